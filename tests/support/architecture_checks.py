"""What a model must be able to do here: answer, learn and be saved as transformers itself does.

Each check raises an AssertionError where it fails. Models are of architectures.py; one process, float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from architectures import VOCAB_SIZE, make_model
from near import assert_near
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from experiments.parts.model_files import model_problems
from realsys.algorithms.kept_sets import KeptSets
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import LoRAOptions, ModelOptions, OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.embedded_engine import generate
from realsys.generation.engine.engine_requests import GenerationRequest
from realsys.generation.engine.sampling import Picking, SlotSampler
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.factories import hf_causal_lm
from realsys.models.source import HFSource

PROMPTS = [torch.tensor(p) for p in ([1, 9, 8], [1, *range(20, 32)], [40, 50, 60, 5, 6, 7])]
SEEDS = torch.tensor([11, 12, 13])
NEW_TOKENS = 10
EOS = 2
GREEDY = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, greedy=True)
SAMPLED = GenerationHyperparameters(max_new_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9)
ADAPTERS = LoRAOptions(rank=2, alpha=4.0, target_modules=("all-linear",))
LENGTHS = ((9, 5), (20,), (3,))  # answers to three questions: two to the first


COLUMNS = {
    "generate": "greedy and sampled answers are those of `generate` of transformers",
    "train": "loss and gradient of a step are those of a plain loop",
    "recompute": "the same gradient, with activations computed again",
    "save": "transformers reads the trained model, and computes the same",
    "lora": "adapters alone train; peft reads them, transformers the merged model",
}
YES = "yes"


def checked(name: str, folder: Path) -> dict[str, str]:
    """Makes a small model of an architecture in ``folder`` and checks all that the plan does not refuse.

    Returns each of ``COLUMNS`` with ``YES`` or the plan's words.
    """
    path = folder / "model"
    make_model(name, path)
    checks = {
        "generate": lambda: check_generation(path),
        "train": lambda: check_training(path),
        "recompute": lambda: check_recomputation(path),
        "save": lambda: check_saving(path, folder / "saved"),
        "lora": lambda: check_adapters(path, folder / "adapted"),
    }
    found = {}
    for column, check in checks.items():
        found[column] = _refusal(path, column)
        if found[column] == YES:
            check()
    return found


def _refusal(path: Path, column: str) -> str:
    options = ModelOptions(path=str(path), lora=ADAPTERS if column == "lora" else LoRAOptions())
    problems = list(model_problems(options, "actor", generates=column == "generate"))
    assert len(problems) <= 1
    for problem in problems:
        assert str(path) in problem.where
        assert problem.fix
    return problems[0].what if problems else YES


# ---- generation -----------------------------------------------------------------------------------


class _OurPick(LogitsProcessor):
    """Leaves transformers' ``generate`` only the token that the engine's sampler draws of its logits."""

    def __init__(self, gconfig: GenerationHyperparameters, seed: int) -> None:
        self.sampler = SlotSampler(torch.device("cpu"))
        self.sampler.add(0, Picking.of(gconfig), seed=seed, position=0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token, _ = self.sampler.pick(scores)
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


def check_generation(path: Path) -> None:
    """Answers of a batch of prompts are those of transformers to each prompt alone."""
    module = hf_module(path)
    for gconfig in (GREEDY, SAMPLED):
        wanted = [
            _of_transformers(module, prompt, gconfig, int(seed))
            for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
        ]
        assert max(map(len, wanted)) > 3
        found = generate(
            module, PROMPTS, gconfig, eos_token_ids=[EOS], pad_token_id=0, row_seeds=SEEDS
        )
        served = _served(module, gconfig)
        for i, prompt in enumerate(PROMPTS):
            kept = None if found.kept is None else found.kept[i]
            for tokens, logprobs, sets in (
                (found.tokens[i].tolist(), found.logprobs[i].tolist(), kept),
                (*served[i], None),
            ):
                assert tokens == wanted[i], f"greedy={gconfig.greedy}, prompt {i}"
                expected = _logprobs(module, prompt, tokens, gconfig.temperature, sets)
                assert_near(torch.tensor(logprobs), expected, rel=1e-4)


def _of_transformers(
    module: Any, prompt: Tensor, gconfig: GenerationHyperparameters, seed: int
) -> list[int]:
    tokens = module.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,  # the processor draws
        eos_token_id=EOS,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([] if gconfig.greedy else [_OurPick(gconfig, seed)]),
    )
    return list(tokens[0, len(prompt) :].tolist())


def _served(module: Any, gconfig: GenerationHyperparameters) -> list[tuple[list[int], list[float]]]:
    """Answers of the generation server's engine, where requests join and leave."""
    engine = ContinuousEngine(module, eos_token_ids=[EOS], max_running=2)
    for i, prompt in enumerate(PROMPTS):
        request = GenerationRequest(
            rid=str(i), prompt=tuple(prompt.tolist()), gconfig=gconfig, seed=int(SEEDS[i])
        )
        engine.submit(request)
    ended = {}
    while len(ended) < len(PROMPTS):
        ended.update((o.rid, (o.tokens, o.logprobs)) for o in engine.step() if o.finish)
    return [ended[str(i)] for i in range(len(PROMPTS))]


def _logprobs(
    module: Any,
    prompt: Tensor,
    answer: Sequence[int],
    temperature: float,
    sets: Sequence[bytes] | None,
) -> Tensor:
    """Over the kept ``sets``, or the whole vocabulary."""
    ids = torch.cat([prompt, torch.tensor(answer)])
    with torch.no_grad():
        logits = module(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    if sets is not None:
        counts = torch.tensor([len(kept) // 4 for kept in sets])
        ids = torch.frombuffer(bytearray(b"".join(sets)), dtype=torch.int32)
        logits = KeptSets(counts, ids).limit(logits)
    every = torch.log_softmax(logits / temperature, dim=-1)
    return every.gather(1, torch.tensor(answer)[:, None])[:, 0]


# ---- training -------------------------------------------------------------------------------------


def batch() -> SequenceSample:
    """Three questions of random tokens; the first two of each answer's tokens are its prompt."""
    flat = [n for lengths in LENGTHS for n in lengths]
    tokens = torch.randint(3, VOCAB_SIZE, (sum(flat),), generator=torch.Generator().manual_seed(0))
    mask = torch.cat([torch.arange(n) < 2 for n in flat])
    keys = ("packed_input_ids", "prompt_mask")
    return SequenceSample.from_tensors(
        "abc", dict.fromkeys(keys, LENGTHS), dict(zip(keys, (tokens, mask), strict=True))
    )


def rows() -> list[Tensor]:
    """The sequences of the batch."""
    flat = [n for lengths in LENGTHS for n in lengths]
    return list(batch().data["packed_input_ids"].split(flat))


def trainer(path: Path, **options: Any) -> Model:
    """A model with backend fsdp, alone."""
    model = hf_causal_lm(
        path=str(path),
        name=ModelName("actor"),
        device="cpu",
        topology=ProcessTopology(),
        rank=0,
        groups=ParallelGroups(),
        base_seed=1,
    )
    options = {"optimizer": OptimizerOptions(lr=1e-2, gradient_clipping=0.0), **options}
    return FSDPBackend(**options).initialize(
        model, FinetuneSpec(total_train_epochs=1, dataset_size=100, train_batch_size=10)
    )


def train(model: Model) -> tuple[float, dict[str, Tensor]]:
    """Makes a step of supervised training; returns its loss and gradient."""
    engine, found = model.module, {}

    def keep(*_: Any) -> None:
        found.update((n, x.grad.clone()) for n, x in engine._shards.items() if x.grad is not None)

    hook = engine.optimizer.register_step_pre_hook(keep)
    stats = engine.train_batch(batch(), loss_fn=next_token_loss, loss_weight_fn=num_answer_tokens)
    hook.remove()
    return stats["loss"], found


def plain_step(path: Path) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the same step by transformers and autograd alone, a sequence at a time."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    num = sum(len(row) - 2 for row in rows())
    total = 0.0
    for row in rows():
        logits = module(row[None], use_cache=False).logits[0, 1:-1]
        loss = F.cross_entropy(logits, row[2:], reduction="sum") / num
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def check_training(path: Path) -> None:
    """A step's loss and gradient are those of a plain loop."""
    loss, gradient = train(trainer(path))
    expected_loss, expected = plain_step(path)
    assert_near(loss, expected_loss)
    assert gradient.keys() >= expected.keys()
    assert_near({name: gradient[name] for name in expected}, expected, rel=1e-4)


def check_recomputation(path: Path) -> None:
    """Recomputed activations give the same gradient."""
    loss, gradient = train(trainer(path))
    again_loss, again = train(trainer(path, recompute=True))
    assert_near(again_loss, loss)
    assert_near(again, gradient)


# ---- saving ---------------------------------------------------------------------------------------


def check_saving(path: Path, to: Path) -> None:
    """A trained model's logits are those of what it saved, read by transformers."""
    model = trainer(path)
    train(model)
    _check_saved(model, to)
    # What is sent to copies of the model is laid out before there is one.
    source = HFSource(str(path), critic=False, dtype="float32", device="cpu")
    laid_out = {weight.name: weight.shape for weight in source.weights()}
    held = {name: box.shape for name, ((box, _),) in model.module.held_weights().items()}
    assert laid_out == held


def _check_saved(model: Model, to: Path) -> None:
    output = model.module.forward(batch())
    model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=str(to))
    _check_logits(AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32), output)


def _check_logits(module: Any, output: Tensor) -> None:
    module.eval()
    flat = [len(row) for row in rows()]
    for row, wanted in zip(rows(), output.split(flat), strict=True):
        with torch.no_grad():
            logits = module(row[None], use_cache=False).logits[0]
        assert_near(logits[:-1], wanted[:-1])  # the last predicts nothing


def check_adapters(path: Path, to: Path) -> None:
    """Adapters alone train; peft reads them, and transformers the model merged with them."""
    model = trainer(path, lora=ADAPTERS)
    before = {n: p.detach().clone() for n, p in model.module.parameters.items()}
    train(model)
    train(model)  # the first step moves B alone, as A sees B's zeros
    after = model.module.parameters
    changed = {n for n, x in before.items() if not torch.equal(after[n], x)}
    adapters = {n for n in before if ".lora_" in n}
    assert changed
    assert changed == adapters
    _check_saved(model, to)
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")  # peft's own call
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        read = PeftModel.from_pretrained(base, str(to / "adapter"))
    _check_logits(read, model.module.forward(batch()))


def hf_module(path: Path) -> Any:
    """The module that generates."""
    return trainer(path).module.whole_module()


def peft_takes(module: Any) -> set[str]:
    """Last parts of the names of the layers that peft itself adapts for ``all-linear``."""
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.inject_adapter_in_model(config, module)
    return {
        name.split(".lora_A")[0].split(".")[-1]
        for name, _ in adapted.named_parameters()
        if ".lora_A." in name
    }
