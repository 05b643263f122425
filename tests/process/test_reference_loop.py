"""The whole system against a plain loop in one process: same model, same data, same numbers.

The loop below uses torch and transformers for everything that learns. From realsys it takes what is
input to both: the questions and their order, and the sampler.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from near import assert_near, near
from real_trials import Trials, explain, metrics_of
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from realsys.api.model import GenerationHyperparameters
from realsys.data.sources.math_questions import MathPrompts
from realsys.generation.engine.embedded_engine import generate
from realsys.generation.engine.sampling import row_seed
from realsys.master.graph.data_schedule import DataSchedule
from realsys.models.hf import load_causal_lm, load_critic, load_tokenizer
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

pytestmark = pytest.mark.process

STEPS, BATCH, GROUP, SEED, LR, KL, LAM = 3, 8, 2, 5, 1e-3, 0.1, 0.95
OPTIONS = (
    f"seed={SEED}",
    f"train_bs_n_seqs={BATCH}",
    f"task.train_size={STEPS * BATCH}",
    "task.eval_size=0",
    f"group_size={GROUP}",
    "gen.max_new_tokens=12",
    "algorithm.ppo_n_minibatches=1",
    "algorithm.ppo_epochs=2",
    f"algorithm.kl_ctl={KL}",
    f"algorithm.gae_lambda={LAM}",
    "algorithm.entropy_coef=0",
    "task.reward=by_length",
    "scheduling.model_worker.cpu=1",
    *(
        f"{role}.optimizer.{setting}"
        for role in ("actor", "critic")
        # At Adam's usual eps rounding is blown up where gradients are next to nothing.
        for setting in (
            f"lr={LR}",
            "lr_schedule=constant",
            "warmup_steps_proportion=0",
            "eps=1e-5",
            "weight_decay=0",
        )
    ),
)

# A random policy never solves a problem; this rule gives every answer a score of its own.
PLUG_IN = """
from realsys.api.registry import register_reward
register_reward("by_length", lambda *, response, **_: len(response) % 7 / 7, trusted=True)
"""


def logprobs(module: torch.nn.Module, tokens: torch.Tensor, start: int) -> torch.Tensor:
    logits = module(input_ids=tokens[None]).logits[0, start - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, tokens[start:, None])[:, 0]


def values(module: torch.nn.Module, tokens: torch.Tensor, start: int) -> torch.Tensor:
    return module(input_ids=tokens[None]).logits[0, start - 1 : -1, 0]


def update(module: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@functools.cache
def plain_ppo(path: Path) -> tuple[list[tuple[float, float]], list[torch.nn.Module]]:
    """(policy loss, value loss) of each step, and the two models after the last."""
    tokenizer = load_tokenizer(path)
    policy, ref, critic = load_causal_lm(path), load_causal_lm(path), load_critic(path)
    data = MathPrompts(
        tokenizer=tokenizer, seed=SEED, split="train", train_size=STEPS * BATCH, eval_size=0
    )
    order = DataSchedule(dataset_size=len(data), batch_size=BATCH, seed=SEED, shuffle=True)
    adam = [
        torch.optim.AdamW(m.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-5, weight_decay=0)
        for m in (policy, critic)
    ]
    losses = []
    for step in range(STEPS):
        points = order.batch(step)
        prompts = [torch.tensor(data.prompt_tokens(p.index)) for p in points for _ in range(GROUP)]
        seeds = [row_seed(SEED, p.id, k, 0) for p in points for k in range(GROUP)]
        answers = generate(
            policy,
            prompts,
            GenerationHyperparameters(max_new_tokens=12),
            eos_token_ids=[tokenizer.eos_token_id],
            pad_token_id=0,
            row_seeds=torch.tensor(seeds),
        ).tokens
        rows = []
        with torch.no_grad():
            for prompt, answer in zip(prompts, answers, strict=True):
                text = tokenizer.decode(answer, skip_special_tokens=True)
                tokens, start = torch.cat([prompt, answer]), len(prompt)
                old, v = logprobs(policy, tokens, start), values(critic, tokens, start)
                reward = -KL * (old - logprobs(ref, tokens, start))
                reward[-1] += len(text) % 7 / 7
                advantage, carried = torch.zeros_like(v), 0.0
                for t in reversed(range(len(v))):
                    following = v[t + 1] if t + 1 < len(v) else 0.0
                    carried = reward[t] + following - v[t] + LAM * carried
                    advantage[t] = carried
                rows.append((tokens, start, old, v, advantage))
        every = torch.cat([advantage for *_, advantage in rows])
        mean, deviation = every.mean(), (every.var() + 1e-8).sqrt()
        of_step = []
        for _ in range(2):
            policy_loss, value_loss = torch.zeros(()), torch.zeros(())
            for tokens, start, old, v, advantage in rows:
                ratio, a = (
                    (logprobs(policy, tokens, start) - old).exp(),
                    (advantage - mean) / deviation,
                )
                policy_loss -= torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()
                new, target = values(critic, tokens, start), advantage + v
                held = v + (new - v).clamp(-0.2, 0.2)
                value_loss += 0.5 * torch.maximum((new - target) ** 2, (held - target) ** 2).sum()
            of_step.append(
                (
                    update(policy, adam[0], policy_loss / len(every)),
                    update(critic, adam[1], value_loss / len(every)),
                )
            )
        losses.append(tuple(sum(x) / 2 for x in zip(*of_step, strict=True)))
    return losses, [policy, critic]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> list[str]:
    plug_in = tmp_path_factory.mktemp("rule") / "by_length.py"
    plug_in.write_text(PLUG_IN)
    return ["--import", str(plug_in), f"actor.path={tiny_policy}", *OPTIONS]


@pytest.fixture(scope="module")
def files(module_trials: Trials, options: list[str]) -> TrialFiles:
    """A trial of three steps that has completed."""
    files = module_trials.launch("ppo-math", "loop", *options)
    view = module_trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def test_three_steps_of_ppo_math_equal_a_plain_loop(files: TrialFiles, tiny_policy: Path) -> None:
    losses, modules = plain_ppo(tiny_policy)
    found = [(r["actor/actor_loss"], r["critic/vf_loss"]) for r in metrics_of(files)]
    assert found == [near(pair) for pair in losses]
    kinds = (AutoModelForCausalLM, AutoModelForTokenClassification)
    for role, kind, module in zip(("actor", "critic"), kinds, modules, strict=True):
        saved = kind.from_pretrained(files.phase(files.root).checkpoints / role / "latest")
        assert_near(dict(saved.state_dict()), dict(module.state_dict()))


def test_the_first_step_of_every_run_is_on_policy(files: TrialFiles) -> None:
    first, *others = metrics_of(files)
    assert first["actor/kl_ref/per_sequence"] == near(0, scale=1.0)
    for row in (first, *others):  # each step samples from the weights that it then trains
        assert row["actor/first_minibatch/importance_weight"] == near(1)
        assert row["actor/first_minibatch/pg_clipfrac"] == 0
        assert row["actor/first_minibatch/max_abs_log_ratio"] < 1e-4  # type: ignore[operator]


def test_two_data_parallel_ranks_equal_the_plain_loop(
    trials: Trials, tiny_policy: Path, options: list[str]
) -> None:
    layout = [f"{role}.parallel=d2" for role in ("actor", "critic", "ref")]
    files = trials.launch("ppo-math", "ranks", *options, *layout)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    assert len(view.workers) == 3
    losses, _ = plain_ppo(tiny_policy)
    found = [(r["actor/actor_loss"], r["critic/vf_loss"]) for r in metrics_of(files)]
    assert found == [near(pair) for pair in losses]
