"""Measures the embedded engine's speed against transformers' ``generate`` in the same run.

``python benchmarks/bench_generation.py [--parts even tailed wide held] [--threads 2] [--rounds 5]``.
Weights are random and no token ends an answer: lengths are drawn beforehand, so both do the same work.

*even*: all answers have equal length. *tailed*: lengths are exponential with a mean of an eighth of the
maximum, in batches of 64 for ``generate`` (each ends with its longest) and with at most 64 running in
the engine; useful tokens count. *wide*: a model of about 100 million parameters, a few steps, compared
with the time to read its weights once, measured in the same run by summing a tensor of their size; also
with 8-bit weights, and their effect on log-probs. *held*: the same model's steps with rows that are held
to a JSON schema, and the sets of tokens that it leaves, against free rows. Both sides alternate within a
round: on a machine with other load the best of the rounds is more informative than the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from realsys.api.model import GenerationHyperparameters
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationRequest

NUM_ROWS, PROMPT_LENGTH = 64, 12
KINDS: tuple[Literal["none", "int8", "fp8"], ...] = ("none", "int8", "fp8")


def say(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def small_llama() -> Any:
    """Width 128, 4 layers, as ``ppo-math`` trains."""
    return _llama(128, 384, 4, heads=4, kv_heads=2, vocabulary=512)


def wide_llama() -> Any:
    """About 100 million parameters."""
    return _llama(768, 2048, 12, heads=12, kv_heads=4, vocabulary=16_384)


def _llama(width: int, mlp: int, layers: int, *, heads: int, kv_heads: int, vocabulary: int) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def prompts_of(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Random, all different."""
    draw = torch.Generator().manual_seed(2)
    rows = torch.randint(3, vocabulary, (count, PROMPT_LENGTH), generator=draw)
    return [tuple(row) for row in rows.tolist()]


def by_engine(
    engine: ContinuousEngine, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> dict[str, list[float]]:
    """Answers with ``lengths[i]`` tokens each; log-probs by rid."""
    engine.flush_prefixes()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        gconfig = GenerationHyperparameters(max_new_tokens=length)
        engine.submit(GenerationRequest(rid=str(i), prompt=prompt, gconfig=gconfig, seed=i))
    logprobs = {}
    while engine.num_running or engine.num_waiting:
        logprobs.update({o.rid: o.logprobs for o in engine.step() if o.finish})
    return logprobs


def by_transformers(
    module: Any, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> None:
    """The same answers with sampling, in batches of ``NUM_ROWS`` that last as long as their longest."""
    for begin in range(0, len(prompts), NUM_ROWS):
        ids = torch.tensor(prompts[begin : begin + NUM_ROWS])
        module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths[begin : begin + NUM_ROWS]),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(name: str, module: Any, lengths: Sequence[int], rounds: int) -> None:
    """One line: thousand tokens a second of both, and how many times more the engine makes."""
    prompts = prompts_of(len(lengths), module.config.vocab_size)
    engine = ContinuousEngine(module, max_running=NUM_ROWS)
    by_engine(engine, prompts[:NUM_ROWS], [2] * min(NUM_ROWS, len(prompts)))
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(seconds(lambda: by_transformers(module, prompts, lengths)))
        ours.append(seconds(lambda: by_engine(engine, prompts, lengths)))
    thousands = sum(lengths) / 1000
    speedups = [b / a for a, b in zip(ours, theirs, strict=True)]
    say(
        f"{name:8} generate {thousands / min(theirs):6.1f}   engine {thousands / min(ours):6.1f}   "
        f"ratio of the best {min(theirs) / min(ours):.2f}, "
        f"median of rounds {statistics.median(speedups):.2f}"
    )


def tailed_lengths(count: int, longest: int) -> list[int]:
    """Exponential with mean ``longest / 8``, cut at ``longest``."""
    draw = torch.Generator().manual_seed(3)
    drawn = torch.empty(count).exponential_(8 / longest, generator=draw)
    return [max(1, min(longest, round(x))) for x in drawn.tolist()]


def wide(rounds: int) -> None:
    """Seconds a step by number of rows, against the time to read the weights."""
    module = wide_llama()
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    memory = torch.ones(num_bytes // 4)
    say(f"wide: {num_bytes // 4 / 1e6:.0f} M parameters, {num_bytes / 1e6:.0f} MB in float32")
    engines = {
        kind: ContinuousEngine(module, max_running=NUM_ROWS, quantize=kind, prefix_bytes=0)
        for kind in KINDS
    }
    for num_rows in (1, 8, 16, 64):
        prompts = prompts_of(num_rows, module.config.vocab_size)
        times: dict[str, list[float]] = {kind: [] for kind in ("read", *KINDS)}
        for _ in range(rounds):
            times["read"].append(seconds(memory.sum))
            for kind, engine in engines.items():
                times[kind].append(seconds_a_step(engine, prompts))
        read, plain, int8, fp8 = (min(found) * 1000 for found in times.values())
        say(
            f"  {num_rows:3} rows: weights read {read:6.1f} ms   step {plain:6.1f} ms "
            f"({read / plain:4.0%} of the bound)   int8 {int8:6.1f} ms   fp8 {fp8:6.1f} ms"
        )
    prompts = prompts_of(8, module.config.vocab_size)
    exact = logprobs_after(engines["none"], prompts)
    for kind in KINDS[1:]:
        moved = (exact - logprobs_after(engines[kind], prompts)).abs()
        say(
            f"  {kind} moves a log-prob by {moved.mean():.1e} in the mean, at most {moved.max():.1e}"
        )


@torch.inference_mode()
def logprobs_after(engine: ContinuousEngine, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Of all tokens that may follow each prompt."""
    slots = list(range(len(prompts)))
    logits, _ = engine.slots.read(prompts, slots)
    engine.slots.free(slots)
    return logits.log_softmax(-1)


def trained_tokenizer(vocabulary: int) -> Any:
    """Byte pairs of the standard library's sources."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<eos>"], initial_alphabet=letters
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    made.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def held(rounds: int) -> None:
    """Seconds a step of rows that are held to a schema, and of free ones, in turn."""
    module = wide_llama()
    tokenizer = trained_tokenizer(module.config.vocab_size)
    say(f"held: a vocabulary of {len(tokenizer):,}")
    engine = ContinuousEngine(
        module, eos_token_ids=[0], max_running=NUM_ROWS, tokenizer=tokenizer, prefix_bytes=0
    )
    grammars = {
        "free": "",
        "numbers": 'start: %json {"type": "array", "items": {"type": "number"}, "minItems": 99}',
        "text": 'start: %json {"type": "string", "minLength": 999}',
    }
    for num_rows in (1, 8, 64):
        prompts = prompts_of(num_rows, module.config.vocab_size)
        times: dict[str, list[float]] = {name: [] for name in grammars}
        for _ in range(rounds):
            for name, grammar in grammars.items():
                times[name].append(seconds_a_step(engine, prompts, grammar=grammar))
        free, numbers, text = (min(found) * 1000 for found in times.values())
        say(
            f"  {num_rows:3} rows: free {free:6.1f} ms   numbers {numbers / free:.2f} x   "
            f"text {text / free:.2f} x"
        )


def seconds_a_step(
    engine: ContinuousEngine, prompts: Sequence[tuple[int, ...]], *, grammar: str = ""
) -> float:
    """Of decoding alone, the best of a few steps."""
    for i, prompt in enumerate(prompts):
        engine.submit(
            GenerationRequest(
                rid=str(i),
                prompt=prompt,
                gconfig=GenerationHyperparameters(max_new_tokens=8),
                seed=i,
                grammar=grammar,
                return_kept=bool(grammar),
            )
        )
    engine.step()
    best = min(seconds(engine.step) for _ in range(3))
    engine.abort_all()
    return best


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["even", "tailed", "wide", "held"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=256, help="of the answers in part tailed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    say(f"{arguments.threads} threads; thousand tokens a second")
    if "even" in arguments.parts:
        compare("even", small_llama(), [32] * NUM_ROWS, arguments.rounds)
    if "tailed" in arguments.parts:
        lengths = tailed_lengths(8 * NUM_ROWS, arguments.longest)
        compare("tailed", small_llama(), lengths, arguments.rounds)
    if "wide" in arguments.parts:
        wide(arguments.rounds)
    if "held" in arguments.parts:
        held(arguments.rounds)


if __name__ == "__main__":
    main()
