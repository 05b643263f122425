"""An agent's held-out score is the agent's, and an agent that gives its reward needs no rule."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.compose import RLExperiment
from experiments.grpo_math import grpo_math_async
from experiments.task import FileTask, GeneratedTask
from experiments.tasks.mixture import Mixture
from realsys.api.worker_configs import HELD_OUT, RolloutWorker
from realsys.config.overrides import with_settings
from realsys.evaluator.answer_statistics import QuestionResult, figures_of
from realsys.evaluator.played_questions import share_of_right

PYTHON = ("task.agent=python", "task.agent_args.function=mine.py:solve")
SAVES = ("auto_eval=true", "exp_ctrl.save_freq_steps=5")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with an agent and with questions that nobody knows answers to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def solve(client): return 1.0\n")
    rows = (json.dumps({"prompt": f"guess {n}", "n": n}) for n in range(40))
    (tmp_path / "q.jsonl").write_text("\n".join(rows))
    return tmp_path


def settings(*given: str) -> RLExperiment:
    made: RLExperiment = with_settings(grpo_math_async(), words=given)
    return made


def asked(experiment: RLExperiment) -> tuple[bool, list[str | None]]:
    """Whether the trainer asks held-out questions, and who plays those of saved checkpoints."""
    config = experiment.with_prepared("sft", "/models/start").initial_setup()
    shards = [shard for worker in config.model_worker for shard in worker.shards]
    players = [b.player and b.player.agent for e in config.evaluator for b in e.benchmarks.values()]
    return any(shard.eval_dataset for shard in shards), players


def remarks(experiment: RLExperiment) -> list[str]:
    return [text for text in experiment.remarks(()) if "held-out questions are not asked" in text]


@pytest.mark.parametrize(
    ("given", "by_trainer", "players", "told"),
    [
        ((), True, [], 0),
        (SAVES, True, [None], 0),
        (PYTHON, False, [], 1),
        ((*PYTHON, *SAVES), False, ["python"], 0),
        (("task.agent=chat",), False, [], 1),
        (("task.agent=math_multi_turn", "task.env_args.turns=2"), False, [], 1),
        (("task.env_args.right=1",), False, [], 1),
        ((*PYTHON, "task.eval_size=0"), False, [], 0),
        (("task.agent=external",), False, [], 1),
        (("task.agent=external", *SAVES, "benchmarks.sums=math"), False, [None], 1),
    ],
)
def test_held_out_questions_are_played_by_the_agent_or_not_asked(
    mine: Path, given: tuple[str, ...], by_trainer: bool, players: list[str | None], told: int
) -> None:
    made = settings(*given)
    assert asked(made) == (by_trainer, players)
    assert len(remarks(made)) == told


def test_what_clients_from_outside_play_is_no_benchmark(mine: Path) -> None:
    found = [p.where for p in settings("task.agent=external", *SAVES).problems()]
    assert found == ["auto_eval and task.eval_size"]
    made = settings("task.agent=external", *SAVES, "benchmarks.sums=math")
    config = made.with_prepared("sft", "/models/start").initial_setup()
    assert HELD_OUT not in config.evaluator[0].benchmarks
    assert not list(made.problems())


@pytest.mark.parametrize(
    ("agent", "env", "needs"),
    [
        ("python", "math_verify", False),
        ("command", "math_verify", False),
        ("external", "math_verify", False),
        ("nemo_gym", "math_verify", False),
        ("of_mine", "math_verify", False),  # it may return its reward
        ("chat", "gymnasium", False),
        ("chat", "openenv", False),
        ("math_single_step", "of_mine", False),
        ("math_single_step", "math_verify", True),
        ("math_multi_turn", "math_verify", True),
        ("tool_use", "calculator", True),
        ("chat", "mcp", True),
    ],
)
def test_a_rule_is_needed_where_neither_agent_nor_environment_may_give_the_reward(
    agent: str, env: str, needs: bool
) -> None:
    given: dict[str, Any] = {"agent": agent, "env": env}
    for task in (
        FileTask(path="q", **given),
        Unscored(**given),
        Mixture(sources={"a": FileTask(path="q"), "b": FileTask(path="r")}, **given),
    ):
        assert [p.where.rpartition(".")[2] for p in task.reward_problems()] == ["reward"] * (
            needs * (2 if isinstance(task, Mixture) else 1)
        )
    some = Mixture(
        sources={"a": FileTask(path="q", reward="math_verify"), "b": FileTask()}, **given
    )
    assert [p.where for p in some.reward_problems()] == ["task.sources.b.reward"]


@dataclass(frozen=True, kw_only=True)
class Unscored(GeneratedTask):
    """Questions without a rule."""

    kind = "guesses_unscored"

    def question(self, rng: random.Random) -> dict[str, Any]:
        number = rng.randrange(1000)
        return {"prompt": f"guess {number}", "answer": str(number)}


def test_the_log_tells_how_many_questions_are_made_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A question in four seconds: said every twelve."""
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr("experiments.task.time.monotonic", lambda: next(clock))
    with caplog.at_level("INFO", logger="experiments.task"):
        assert len(Unscored(train_size=7).records("train", seed=1)) == 7
    assert [record.args for record in caplog.records] == [(3, 7, 16.0), (6, 7, 4.0)]


def test_a_run_without_a_rule_has_none_anywhere(mine: Path) -> None:
    words = ("task=file", f"task.path={mine}/q.jsonl", "task.eval_size=8", *PYTHON)
    made = settings(*words, "actor.path=m", "train_bs_n_seqs=4", *SAVES)
    assert {p.where for p in made.problems()} == {"actor.path, m"}  # there is no such model
    config = made.initial_setup()
    (worker,) = config.rollout_worker
    assert worker.env_args == {"reward": ""}
    assert config.evaluator[0].benchmarks[HELD_OUT].player is not None
    assert "reward_workers and task.reward" in {
        p.where for p in settings(*words, "actor.path=m", "reward_workers=1").problems()
    }


@pytest.mark.parametrize(
    ("roles", "refused"),
    [
        ({"a": "m", "b": "n"}, True),
        ({"a": {"path": "m"}}, True),
        ([{"name": "a", "path": "m"}, "b"], True),
        (["a", "b"], False),
        ([], False),
    ],
)
def test_roles_of_different_models_are_refused(mine: Path, roles: Any, refused: bool) -> None:
    task = FileTask(
        path=f"{mine}/q.jsonl",
        agent="python",
        agent_args={"function": "mine.py:solve", "roles": roles},
        eval_size=8,
    )
    found = [p.where for p in task.problems(batch_size=1, tokenizer_dir=None)]
    assert found == ["task.agent_args.roles"] * refused


@pytest.mark.parametrize(("reward", "name"), [("math_verify", "accuracy"), ("", "success")])
def test_a_share_of_episodes_is_an_accuracy_only_where_a_rule_says_what_is_right(
    reward: str, name: str
) -> None:
    result = QuestionResult(
        id="q", rewards=(0.75,), num_correct=1, lengths=(1,), truncated=(False,), source="a"
    )
    right = share_of_right(RolloutWorker(env_args={"reward": reward}))
    found = figures_of([result], num_answers=1, seed=1, right=right)
    assert found["mean_reward"].value == 0.75
    shares = {"accuracy", "success", "accuracy/a", "success/a"}
    assert {key: found[key].value for key in shares & set(found)} == {name: 1.0, f"{name}/a": 1.0}
