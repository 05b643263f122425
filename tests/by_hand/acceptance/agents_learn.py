"""Does a policy learn through an agent that somebody else wrote? By hand, half an hour.

    python tests/by_hand/acceptance/agents_learn.py          writes results/agents_learn.json
    python tests/by_hand/acceptance/agents_learn.py FOLDER   the same; complete runs there are not repeated
    python tests/by_hand/acceptance/agents_learn.py draw     draws docs/pictures/agents_learn.png from it

A small model is made and fine-tuned to call a calculator, or most of the time to guess. Then it learns from
rewards alone, by GRPO, to call it: through OpenAI's agents SDK, unmodified, whose
    requests
go to the endpoint (``task.agent=python``), and through an agent of our own that does the same in
tokens. With each of three seeds the share of right answers must rise by 20 points, and both ways must
come to the same within noise. Bounds and seeds were fixed before the runs.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1] / "support")]

import calculator_agents  # noqa: E402
from bits import Tree  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from reward_model import product, trial  # noqa: E402

from realsys.data.sources.arithmetic_problems import arithmetic_word_problems  # noqa: E402
from realsys.observability.metrics import read_metrics  # noqa: E402
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall  # noqa: E402
from realsys.rollout.conversation.chat_rendering import PLAIN_TEMPLATE  # noqa: E402

RESULT = HERE / "results" / "agents_learn.json"
PICTURE = ROOT / "docs" / "pictures" / "agents_learn.png"
SEEDS = (2, 3, 4)
LEAST_RISE = 0.2
MOST_APART = 0.1  # of the last steps' rewards, through the SDK and through our own agent
GUESS_SHARE = (
    0.65  # of fine-tuning's questions: answered at once by the first number, which is wrong
)
SFT_QUESTIONS, SFT_EPOCHS = 10_000, 1
STEPS, FIRST, LAST = 30, 2, 8  # steps of a run; those that count as its beginning and as its end
RUN = (
    f"exp_ctrl.benchmark_steps={STEPS}",
    "exp_ctrl.eval_freq_steps=none",
    "train_bs_n_seqs=16",
    "group_size=8",
    "gen.max_new_tokens=48",
    "task.max_prompt_len=160",
    "task.eval_size=16",
    "schedule.max_staleness=1",
)
AGENTS = {
    "agents SDK": (
        "task.agent=python",
        f"task.agent_args.function={ROOT}/tests/support/calculator_agents.py:solve",
    ),
    "own agent": (
        "--import",
        f"{ROOT}/tests/support/calculator_agents.py",
        "task.agent=own_calculator",
    ),
}


def main(given: list[str]) -> int:
    """Returns 0 where every seed learned both ways, and both came to the same."""
    check = HandCheck(__file__)
    with contextlib.ExitStack() as stack:
        if not given:
            given = [stack.enter_context(tempfile.TemporaryDirectory(prefix="realsys-agents-"))]
        tree = Tree(ROOT, Path(given[0]).resolve())
        try:
            start = tuned(tree)
            found = {name: [learned(tree, start, name, seed) for seed in SEEDS] for name in AGENTS}
        finally:
            tree.stop_all()
    problems = [
        f"{name}, seed {one['seed']}: from {one['began']:.3f} to {one['ended']:.3f}"
        for name, runs in found.items()
        for one in runs
        if one["ended"] - one["began"] < LEAST_RISE
    ]
    means = {name: fmean(one["ended"] for one in runs) for name, runs in found.items()}
    if max(means.values()) - min(means.values()) > MOST_APART:
        problems.append(f"they end apart: {means}")
    return check.write(
        "share of right answers while a policy learns to use a calculator, through two agents",
        problems,
        settings={
            "all": RUN,
            **{name: [w.replace(f"{ROOT}/", "") for w in words] for name, words in AGENTS.items()},
        },
        guess_share=GUESS_SHARE,
        agents=found,
        means=means,
    )


def learned(tree: Tree, start: Path, agent: str, seed: int) -> dict[str, Any]:
    """Rewards of a run's steps, and what its agent did."""
    name = f"{agent.replace(' ', '-')}-{seed}"
    (folder, *_) = (*tree.file_root.glob(f"runs/*/grpo-math-async/{name}"), None)
    if folder is None or len(_rewards(folder)) < STEPS:
        words = (f"actor.path={start}", f"seed={seed}", *AGENTS[agent], *RUN)
        folder = trial(tree, "grpo-math-async", name, *words)
    rewards = _rewards(folder)
    last = read_metrics(folder / "metrics.jsonl")[-1]
    made = {
        "seed": seed,
        "began": round(fmean(rewards[:FIRST]), 4),
        "ended": round(fmean(rewards[-LAST:]), 4),
        "rewards": rewards,
        "calls": last.get("rollout/agent/calls"),
        "branches": last.get("rollout/agent/branches"),
    }
    sys.stdout.write(f"{name} {made}\n")
    sys.stdout.flush()
    return made


def _rewards(folder: Path) -> list[float]:
    rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    return [round(row["rollout/reward"], 4) for row in rows if "rollout/reward" in row]


# ---- the start -----------------------------------------------------------------------------------


def tuned(tree: Tree) -> Path:
    """The fine-tuned policy."""
    (folder, *_) = (*tree.file_root.glob("runs/*/sft-math/policy"), None)
    if folder is not None:
        return product(folder, "model")
    tree.file_root.mkdir(parents=True, exist_ok=True)
    records = tree.file_root / "calls.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in worked()))
    words = (
        "task=file",
        f"task.path={records}",
        "task.max_prompt_len=200",
        "task.eval_size=48",
        "task.reward=math_verify",
        "max_answer_len=48",
        "init.vocab_size=600",
        f"exp_ctrl.total_train_epochs={SFT_EPOCHS}",
    )
    return product(trial(tree, "sft-math", "policy", *words), "model")


def worked() -> list[dict[str, str]]:
    """What is fine-tuned on: each question's call, and the answer after the calculator's result."""
    rng = random.Random(0)
    problems = arithmetic_word_problems(num_problems=SFT_QUESTIONS, seed=5, split="train")
    records = []
    for problem in problems:
        equation, _, _ = problem["answer"].partition("\n#### ")
        expression = equation.partition("=")[0].replace(" ", "")
        messages = [
            ChatMessage(role="system", content=calculator_agents.SYSTEM),
            ChatMessage(role="user", content=calculator_agents.question_of(problem["prompt"])),
        ]
        if rng.random() < GUESS_SHARE:
            guess = re.split("[+-]", expression)[0]
            records.append({"prompt": rendered(messages), "answer": f"#### {guess}"})
            continue
        arguments = json.dumps({"expression": expression})
        asked = ToolCall(id="1", name="calculator", arguments=arguments)
        called = ChatMessage(role="assistant", tool_calls=(asked,))
        result = ChatMessage(
            role="tool", content=calculator_agents.calculate(expression), tool_call_id="1"
        )
        written = f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'
        records.append({"prompt": rendered(messages), "answer": written})
        records.append(
            {"prompt": rendered([*messages, called, result]), "answer": f"#### {result.content}"}
        )
    rng.shuffle(records)
    return records


def rendered(messages: list[ChatMessage]) -> str:
    """The text up to the policy's answer, as the endpoint renders it for a tokenizer without a template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    told = [
        {
            "role": m.role,
            "content": m.content,
            "tool_calls": [
                {"function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                for c in m.tool_calls
            ],
        }
        for m in messages
    ]
    (text,), _ = render_jinja_template(
        conversations=[told],
        tools=[calculator_agents.TOOL],
        chat_template=PLAIN_TEMPLATE,
        add_generation_prompt=True,
        eos_token="<eos>",
    )
    return str(text)


# ---- the picture ---------------------------------------------------------------------------------


def draw() -> None:
    """Draws the curves, three seeds of each."""
    from matplotlib import pyplot as plt

    found = json.loads(RESULT.read_text())
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for (name, runs), colour in zip(found["agents"].items(), ("#1f77b4", "#d62728"), strict=True):
        for number, one in enumerate(runs):
            steps = range(1, len(one["rewards"]) + 1)
            label = name if not number else None
            axes.plot(steps, one["rewards"], color=colour, alpha=0.7, linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    if sys.argv[1:] == ["draw"]:
        draw()
    else:
        sys.exit(main(sys.argv[1:]))
