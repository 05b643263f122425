"""Agents play held-out questions with a saved model: alone (`realsys eval`), and beside a training."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from real_trials import Trials, explain

from experiments.task import MathTask
from realsys.api.agent import Ask, Environment, EpisodeTask, Trajectory
from realsys.api.basics import plugin_table
from realsys.api.errors import ConfigError, RewardError, RolloutError
from realsys.api.model import GenerationHyperparameters
from realsys.api.worker_configs import HELD_OUT, Benchmark, Evaluator, RolloutWorker
from realsys.evaluator import played_questions
from realsys.evaluator.evaluating import evaluate_checkpoint
from realsys.evaluator.evaluation_errors import LeaveRequested
from realsys.evaluator.played_questions import HOPELESS, MOST_TRIES
from realsys.evaluator.saved_model import EvaluatedModel, evaluate_episodes, evaluate_model
from realsys.observability.jsonl import read_jsonl
from realsys.rollout.agents.math_single_step import MathSingleStep
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

NUM_QUESTIONS, NEW_TOKENS = 8, 10
GREEDY = GenerationHyperparameters(greedy=True, max_new_tokens=NEW_TOKENS)
SAMPLED = GenerationHyperparameters(temperature=1.0, max_new_tokens=NEW_TOKENS)
TASK = MathTask(eval_size=NUM_QUESTIONS)


def player(gconfig: GenerationHyperparameters, n: int = 1, agent: str = "") -> RolloutWorker:
    task = replace(TASK, agent=agent) if agent else TASK
    return task.player("test", base_seed=1, gconfig=gconfig, group_size=n)


def played(model: Path, worker: RolloutWorker, tmp_path: Path, **given: Any) -> EvaluatedModel:
    options: dict[str, Any] = {
        "longest_prompt": TASK.longest_prompt,
        "max_new_tokens": NEW_TOKENS,
        "limit": None,
        "device": "cpu",
        "dtype": "float32",
        "report": lambda line: None,
    }
    return evaluate_episodes(model, worker, logs=tmp_path / "logs", **{**options, **given})


@pytest.mark.parametrize(("gconfig", "n"), [(GREEDY, 1), (SAMPLED, 4)], ids=["greedy", "sampled"])
def test_episodes_of_one_answer_are_the_answers_of_an_evaluation_without_an_agent(
    tiny_policy: Path, tmp_path: Path, gconfig: GenerationHyperparameters, n: int
) -> None:
    asked = Benchmark(dataset=TASK.prompts("test"), n=n, **TASK.reward_rule)
    answered = evaluate_model(
        tiny_policy,
        Evaluator(benchmarks={HELD_OUT: asked}, gconfig=gconfig),
        longest_prompt=TASK.longest_prompt,
        max_new_tokens=NEW_TOKENS,
        limit=6,
        device="cpu",
        dtype="float32",
        report=lambda line: None,
    )
    found = played(tiny_policy, player(gconfig, n), tmp_path, limit=6)
    assert (found.num_questions, found.num_held_out) == (6, NUM_QUESTIONS)
    assert [replace(result, stats={}) for result in found.results] == list(answered.results)
    assert {name: found.figures[name] for name in answered.figures} == answered.figures


class Odd(MathSingleStep):
    """An agent that does to each question what a test wants. ``calls``: episodes, by question."""

    what: ClassVar[Callable[[int, int], None]]
    calls: ClassVar[Counter[int]]
    turns: ClassVar[float] = 2.0
    wait_s: ClassVar[float] = 0.0

    async def run_episode(self, task: EpisodeTask) -> Any:
        index = int(task.id.split("-")[1].partition(".")[0])
        self.calls[index] += 1
        self.what(index, self.calls[index])
        await asyncio.sleep(self.wait_s)
        return await super().run_episode(task)

    async def run(
        self, prompt: Sequence[int], *, ask: Ask, environment: Environment, tokenizer: Any
    ) -> Trajectory:
        made = await super().run(prompt, ask=ask, environment=environment, tokenizer=tokenizer)
        return replace(made, reward=0.75, stats={"turns": self.turns})


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> type[Odd]:
    """The registered agent ``odd``, which does nothing odd."""

    class Registered(Odd):
        what: ClassVar[Any] = staticmethod(lambda index, call: None)
        calls: ClassVar = Counter[int]()

    monkeypatch.setitem(plugin_table.registered["agent"], "odd", Registered)
    return Registered


def test_what_fails_is_played_again_and_what_has_no_score_is_told(
    tiny_policy: Path, tmp_path: Path, odd: type[Odd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_questions, "PAUSES_S", (0.1, 0.2))

    def what(index: int, call: int) -> None:
        if index == 1 and call < MOST_TRIES:
            raise OSError("the line is down")
        if index == 2:
            raise ValueError("never\nit works")
        if index == 3:
            raise RewardError("the rule broke", where="rule", fix="mend it")

    odd.what = staticmethod(what)
    began = time.monotonic()
    found = played(tiny_policy, player(GREEDY, agent="odd"), tmp_path)
    assert time.monotonic() - began >= 0.3  # a service that is away gets time to come back
    assert odd.calls == {i: {1: MOST_TRIES, 2: MOST_TRIES}.get(i, 1) for i in range(NUM_QUESTIONS)}
    problems = {result.id: result.problem for result in found.results if not result.rewards}
    assert problems.keys() == {"eval-2", "eval-3"}
    assert problems["eval-2"].startswith("test_played_evaluation.py:")  # the user's own line
    assert problems["eval-2"].endswith(" in what: ValueError: never it works")
    assert problems["eval-3"] == "the rule broke"
    assert found.num_unscored == 2
    assert found.figures["accuracy"].value == 1.0  # of the others; 2 have no score, not a wrong one
    assert found.figures["mean_reward"].value == 0.75
    assert found.figures["agent/turns"].value == 2.0


def test_what_ends_its_process_or_tells_no_number_ends_its_episode_alone(
    tiny_policy: Path, tmp_path: Path, odd: type[Odd]
) -> None:
    def what(index: int, call: int) -> None:
        if index == 1:
            raise SystemExit(3)
        if index == 2:
            raise asyncio.CancelledError
        odd.turns = float("nan") if index == 3 else 2.0

    odd.what = staticmethod(what)
    worker = replace(player(GREEDY, agent="odd"), max_concurrent_rollouts=1)
    found = played(tiny_policy, worker, tmp_path)
    problems = {result.id: result.problem for result in found.results if result.problem}
    assert problems == {
        "eval-1": "agent 'odd' raised SystemExit: 3",
        "eval-2": "agent 'odd' raised CancelledError",
    }
    assert "agent/turns" not in found.results[3].stats
    assert found.figures["agent/turns"].value == 2.0


def test_quick_failures_do_not_outrun_the_first_questions(
    tiny_policy: Path, tmp_path: Path, odd: type[Odd]
) -> None:
    def what(index: int, call: int) -> None:
        if index >= 1:
            raise ValueError("quick")

    odd.what = staticmethod(what)
    odd.wait_s = 0.5
    found = played(tiny_policy, player(GREEDY, agent="odd"), tmp_path)
    assert [result.num_correct for result in found.results] == [1] + [0] * (NUM_QUESTIONS - 1)


def test_an_agent_that_never_works_ends_it_soon(
    tiny_policy: Path, tmp_path: Path, odd: type[Odd]
) -> None:
    def what(index: int, call: int) -> None:
        raise ValueError("no key")

    odd.what = staticmethod(what)
    task = replace(TASK, eval_size=100, agent="odd")
    worker = task.player("test", gconfig=GREEDY, max_concurrent_rollouts=1)
    with pytest.raises(RolloutError, match=f"{HOPELESS} questions.*ValueError: no key"):
        played(tiny_policy, worker, tmp_path)
    assert HOPELESS <= len(odd.calls) <= HOPELESS + 1  # the next one may have begun
    odd.calls.clear()
    with pytest.raises(RolloutError, match="2 questions"):
        played(tiny_policy, worker, tmp_path, limit=2)


def test_what_another_try_would_not_change_ends_it_at_once(
    tiny_policy: Path, tmp_path: Path, odd: type[Odd]
) -> None:
    def what(index: int, call: int) -> None:
        raise ConfigError("no such tool", where="agent", fix="name another")

    odd.what = staticmethod(what)
    worker = player(GREEDY, agent="odd")
    with pytest.raises(ConfigError, match="tool"):
        played(tiny_policy, replace(worker, max_concurrent_rollouts=1), tmp_path)
    assert set(odd.calls.values()) == {1}
    assert len(odd.calls) <= 2  # the next one may have begun


def test_an_evaluator_leaves_in_the_middle_of_an_episode(
    tiny_policy: Path, tmp_path: Path, odd: type[Odd]
) -> None:
    def leave() -> None:
        if odd.calls:
            raise LeaveRequested

    config = Evaluator(
        benchmarks={
            "one": Benchmark(dataset=TASK.prompts("test"), player=player(GREEDY, agent="odd")),
            "two": Benchmark(dataset=TASK.prompts("test")),
        },
        gconfig=replace(GREEDY, max_new_tokens=100, min_new_tokens=100),
    )
    with pytest.raises(LeaveRequested):
        evaluate_checkpoint(
            tiny_policy, config, device="cpu", before_batch=leave, logs=tmp_path / "logs"
        )


AGENT = """
async def solve(client, task, model):
    messages = [{"role": "user", "content": task["prompt"]}]
    made = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    text = made.choices[0].message.content
    return {"reward": len(text) % 2, "letters": len(text)}
"""


PROGRAM = """
import json, os, urllib.request
from pathlib import Path

task = json.loads(Path(os.environ["REALSYS_TASK_FILE"]).read_text())
body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    text = json.load(response)["choices"][0]["message"]["content"]
Path(os.environ["REALSYS_REWARD_FILE"]).write_text(json.dumps({"reward": len(text) % 2}))
"""


def test_a_trial_evaluates_its_agent_and_eval_gives_the_same_figures_again(
    trials: Trials, tiny_policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    files = trials.launch(
        *("grpo-math-async", "acts", f"actor.path={tiny_policy}"),
        "auto_eval=true",
        *("exp_ctrl.save_freq_steps=3", "exp_ctrl.benchmark_steps=3"),
        *("task.agent=python", f"task.agent_args.function={tmp_path}/own.py:solve"),
        *("task.eval_size=6", "gen.max_new_tokens=12", "evaluator.n=2"),
        *("train_bs_n_seqs=4", "group_size=2"),
        *("benchmarks.talks=math", "benchmarks.talks.agent=chat", "benchmarks.talks.eval_size=4"),
        *("benchmarks.asked=math", "benchmarks.asked.eval_size=4"),
        *("benchmarks.runs=math", "benchmarks.runs.agent=command", "benchmarks.runs.eval_size=4"),
        f"benchmarks.runs.agent_args.command=python {tmp_path}/program.py",
    )
    view = trials.wait(files, timeout_s=200)
    assert view.state is State.COMPLETED, explain(files, view)
    (row,) = read_jsonl(files.phase(files.root).evaluations)
    figures: Mapping[str, float] = row["figures"]
    assert (row["result"], row["error"]) == ("done", "")
    assert figures["agent/calls"] == 1.0
    assert figures["agent/letters"] > 0
    assert figures["num_problems"] == 6
    assert {"pass@1", "pass@2", "talks/agent/turns", "talks/pass@2"} < figures.keys()
    assert "asked/accuracy" in figures
    assert not any(name.startswith("asked/agent") for name in figures)
    for prefix in ("talks/", "runs/", ""):
        words = ("--benchmark", prefix[:-1]) if prefix else ()
        done = trials.run("eval", "grpo-math-async/acts", *words, "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        again = {prefix + name: figure["value"] for name, figure in told["figures"].items()}
        assert again.items() <= figures.items()
    logs = Path(told["file"]).with_name("actor-step-000003-math-1.agents")
    assert sorted(path.name for path in logs.iterdir()) == ["episodes.jsonl", "host-0.log"]
