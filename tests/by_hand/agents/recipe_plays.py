"""The recipes of docs/agent_recipes.md, played: in a real run on this node, and in a Harbor task's box."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from client_trials import log_rows
from doc_pages import DocPage
from page_stories import harbor_tasks
from real_trials import Trials, explain, metrics_of, trained_ids

from realsys.api import registry
from realsys.api.agent import AgentHost, Answer, Episode, EpisodeTask
from realsys.data.rollout_dump import RolloutDump
from realsys.models.hf import load_tokenizer
from realsys.trial.trial_state import State

PAGE = "agent_recipes.md"
PLACE = "/opt/agents"  # of the page
POSITIONS = 65536
TRIAL_S, EPISODE_S, BOX_S = 900, 400, 240
WORK = "wc -l < poem.txt > lines.txt"
BOX_RULE = {"disk": 256, "mem": 2048, "verifier_s": 30.0, "boxes_at_once": 1}
NODE_SETTINGS = (
    "task.train_size=64",
    "task.eval_size=8",
    "train_bs_n_seqs=1",
    "group_size=2",
    "gen.max_new_tokens=96",
    "exp_ctrl.benchmark_steps=1",
    "exp_ctrl.ckpt_freq_secs=none",
    "algorithm.ppo_n_minibatches=1",
    "scheduling.model_worker.cpu=1",
    "schedule.dump=true",
    "tensorboard=false",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An agent of the page.

    Attributes:
        program: what is installed, below the agents' folder.
        version: command that says its version, below that folder.
        says: what a policy says in the box, so that the task is done.
    """

    program: str
    version: Sequence[str]
    says: Sequence[str]


def call(name: str, **arguments: Any) -> str:
    """A call of a tool as the policy's template has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


_PIP = ("-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
RECIPES = {
    "mini": Recipe(
        program="mini/bin/mini",
        version=("mini/bin/python", *_PIP),
        says=(
            call("bash", command=WORK),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
    ),
    "codex": Recipe(
        program="codex/node_modules/.bin/codex",
        version=("codex/node_modules/.bin/codex", "--version"),
        says=(call("exec_command", cmd=WORK), "done"),
    ),
    "claude": Recipe(
        program="claude/node_modules/.bin/claude",
        version=("claude/node_modules/.bin/claude", "--version"),
        says=(call("Bash", command=WORK, description="counts lines"), "done"),
    ),
    "qwen": Recipe(
        program="qwen/node_modules/.bin/qwen",
        version=("qwen/node_modules/.bin/qwen", "--version"),
        says=(
            call("run_shell_command", command=WORK, is_background=False, description="counts"),
            "done",
        ),
    ),
    "opencode": Recipe(
        program="opencode/node_modules/.bin/opencode",
        version=("opencode/node_modules/.bin/opencode", "--version"),
        says=(call("bash", command=WORK, description="counts lines"), "done"),
    ),
    "aider": Recipe(
        program="aider/bin/aider",
        version=("aider/bin/python", *_PIP),
        says=("lines.txt\n```\n3\n```\n",),
    ),
    "openhands": Recipe(
        program="openhands/bin/python",
        version=("openhands/bin/python", *_PIP),
        says=(  # a box has no terminals
            call("file_editor", command="create", path="/app/lines.txt", file_text="3\n"),
            call("finish", message="done"),
        ),
    ),
}
_PACKAGES = ("mini-swe-agent", "aider-chat", "openhands-sdk", "openhands-tools", "litellm")


def write_recipes(folder: Path) -> None:
    """Writes the page's files as they stand there, with ``folder`` in place of /opt/agents."""
    text = DocPage(PAGE).text
    for block in re.findall(r"^```(?:bash|python)\n(# /opt/agents/.*?)^```", text, re.M | re.S):
        name = re.match(r"# /opt/agents/([\w.]+)", block)
        assert name is not None, block
        (folder / name[1]).write_text(block.replace(PLACE, str(folder)))


def version_in(said: str) -> str:
    """The versions in what a version command printed."""
    lines = said.strip().splitlines()
    packages = [line for line in lines if line.partition("==")[0] in _PACKAGES]
    return ", ".join(packages) or (lines[0] if lines else "")


@dataclass
class Found:
    """What playing a recipe came to."""

    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


# ---- in a run, on this node ----------------------------------------------------------------------


def play_on_node(trials: Trials, name: str, agents: Path, policy: Path) -> Found:
    """A run of one step, whose two episodes are the agent's (``task.agent=command``)."""
    files = trials.launch(
        "grpo-math-async",
        name,
        f"actor.path={policy}",
        *NODE_SETTINGS,
        "task.agent=command",
        f"task.agent_args.command=bash {agents}/{name}.sh",
        f"task.agent_args.timeout_s={EPISODE_S}",
        "task.agent_args.keep_logs=true",
    )
    try:
        view = trials.wait(files, timeout_s=TRIAL_S)
        if view.state is not State.COMPLETED:
            return Found([explain(files, view), *_last_logs(files.root)])
        trained = trained_ids(files)
        dump = RolloutDump(files.phase(files.root).rollout_dump.glob("*.rollouts"))
        rows = [r for r in metrics_of(files) if "rollout/agent/calls" in r]
        failed = fmean(float(str(r["rollout/agent/failed"])) for r in rows)
        figures: dict[str, Any] = {
            "requests_an_episode": fmean(float(str(r["rollout/agent/calls"])) for r in rows),
            "failed": failed,
            "questions_trained": len(trained),
        }
        problems = [] if trained else ["nothing was trained on"]
        kept = {row["id"] for row in log_rows(files) if row["outcome"] == "kept"}
        problems += [
            f"{t} was trained on, not kept" for t in trained if t.partition(".")[0] not in kept
        ]
        masks = dump.read([t for t in trained if t in dump.ids]).data["prompt_mask"].tolist()
        figures["prompt_tokens"] = masks.index(False) if False in masks else None
        figures["trained_tokens"] = masks.count(False)
        if not figures["trained_tokens"]:
            problems.append("no answer was trained on")
        if failed:
            figures["why_failed"] = _last_logs(files.root)
        return Found(problems, figures)
    finally:
        trials.end_all()


def _last_logs(root: Path) -> list[str]:
    """The last lines of the newest agent's log."""
    logs = sorted(root.glob("rows/*/agents/*/*.log"), key=lambda p: p.stat().st_mtime)
    return (
        [line[:300] for line in logs[-1].read_text(errors="replace").splitlines()[-8:]]
        if logs
        else []
    )


# ---- in a box, without a network -----------------------------------------------------------------


class RecipePolicy:
    """Says its texts one after the other to requests that show tools or the task, then "done"."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._left = tokenizer, list(texts)
        self.prompts: list[str] = []
        self.tokens: list[int] = []

    async def __call__(self, tokens: Sequence[int], limit: Any = None, /, **_: Any) -> Answer:
        self.prompts.append(self._tokenizer.decode(list(tokens)))
        self.tokens.append(len(tokens))
        text = self._left.pop(0) if self._left else "done"
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        ids = (*ids, self._tokenizer.eos_token_id)
        return Answer(
            tokens=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), stopped=True
        )


def play_in_box(name: str, reads: Sequence[str | Path], policy: Path, folder: Path) -> Found:
    """An episode of docs/harbor.md's task in its box (``task.agent=harbor_command``): tests must pay."""
    tasks = folder / "harbor"
    if not tasks.exists():
        tasks.mkdir(parents=True)
        harbor_tasks(DocPage("harbor.md"), tasks)
        for toml in tasks.glob("tasks/*/task.toml"):
            toml.write_text(toml.read_text().replace("memory_mb = 512", "memory_mb = 2048"))
    agent: Any = registry.make_agent(
        "harbor_command",
        command=f"bash {reads[0]}/{name}.sh",
        rule={**BOX_RULE, "reads": tuple(map(str, reads))},
        timeout_s=BOX_S + BOX_RULE["verifier_s"],
        keep_logs=True,
    )
    logs = folder / "logs" / name
    ask = RecipePolicy(load_tokenizer(policy), RECIPES[name].says)
    try:
        episode = asyncio.run(_boxed(agent, ask, logs, policy, tasks))
    except Exception as error:
        told = [f"{type(error).__name__}: {error}"[:1000], *_box_log(logs)]
        return Found(told, {"requests": len(ask.tokens)})
    finally:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "prompts.txt").write_text("\n\n=====\n\n".join(ask.prompts))
        if agent._tests._sandbox is not None:
            agent._tests._sandbox._sandbox.close()
    figures = {
        "reward": episode.reward,
        "requests": len(ask.tokens),
        "prompt_tokens": ask.tokens[0],
        "seconds": round(episode.stats["command_seconds"], 1),
        "branches": episode.stats["branches"],
    }
    problems = [] if episode.reward == 1.0 else [f"its reward was {episode.reward}"]
    problems += [episode.problem] if episode.problem else []
    return Found([*problems, *(_box_log(logs) if problems else [])], figures)


async def _boxed(agent: Any, ask: RecipePolicy, logs: Path, policy: Path, tasks: Path) -> Episode:
    tokenizer = load_tokenizer(policy)
    ends = frozenset({tokenizer.eos_token_id})
    await agent.open(AgentHost(name="w", tokenizer=tokenizer, end_ids=ends, folder=logs))
    task = EpisodeTask(
        id="e", prompt=[], ask=ask, environment=None, tokenizer=tokenizer,  # type: ignore[arg-type]
        record={"prompt": "?", "task_directory": str(tasks / "tasks/count-lines-0")},
    )  # fmt: skip
    try:
        played: Episode = await agent.run_episode(task)
    finally:
        await agent.close()
    return played


def _box_log(logs: Path) -> list[str]:
    log = logs / "e.log"
    return (
        [line[:300] for line in log.read_text(errors="replace").splitlines()[-12:]]
        if log.exists()
        else []
    )
