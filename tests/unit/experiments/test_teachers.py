"""Teachers of a run: the calls that ask them, and what is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import golden
import pytest
from real_trials import make_policy

from experiments.compose import RLExperiment
from launcher.submit.planning import default_experiment
from realsys.config.overrides import with_settings


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "policy")


def run(name: str, *words: str) -> RLExperiment:
    made: Any = with_settings(default_experiment(name), words=words)
    return made


def what(experiment: RLExperiment) -> list[str]:
    return [problem.what for problem in experiment.problems()]


def changed(policy: Path, folder: Path, file: str, **keys: Any) -> Path:
    """A copy of a model with other values in one of its files."""
    shutil.copytree(policy, folder)
    read = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**read, **keys}))
    return folder


def test_each_teacher_is_asked_before_the_update_which_reads_what_it_says(policy: Path) -> None:
    made = run(
        "grpo-math",
        f"actor.path={policy}",
        f"teachers.near.path={policy}",
        "teachers.near.weight=0.5",
        f"teachers.far.path={policy}",
        "teachers.far.top_k=4",
        "gen.top_p=0.9",
    )
    calls = {call.name: call for call in made.initial_setup().model_rpcs}
    near, far, update = (calls[n] for n in ("teacher_near_inf", "teacher_far_inf", "actor_train"))
    kept = ("packed_kept_counts", "packed_kept_ids")
    assert near.input_keys == ("packed_input_ids", *kept), "log-probs over what was sampled from"
    assert far.input_keys == ("packed_input_ids",), "its own most probable tokens"
    assert near.output_keys == ("packed_teacher_logprobs_near",)
    assert far.output_keys == ("packed_teacher_top_ids_far", "packed_teacher_top_logprobs_far")
    assert {*near.output_keys, *far.output_keys} <= set(update.input_keys)
    args = update.interface_impl.args
    assert args["teachers"] == {"packed_teacher_logprobs_near": 0.5}
    assert args["forward_teachers"] == {"far": 1.0}
    assert what(made) == []


def test_what_can_teach_nothing_is_refused(policy: Path, tmp_path: Path) -> None:
    actor, teacher = f"actor.path={policy}", "teachers.big.path="
    golden.check(" ".join(what(run("distill-math", actor))))
    assert what(run("distill-math", actor, "algorithm.nll_coef=0.1")) == []
    golden.check(what(run("grpo-math", f"{teacher}{policy}"))[0])
    golden.check(what(run("grpo-math", actor, "teachers.big.weight=2"))[0])
    short = changed(policy, tmp_path / "short", "config.json", max_position_embeddings=16)
    (problem,) = what(run("grpo-math", actor, f"{teacher}{short}"))
    assert "the teacher has 16 positions" in problem
    idle = what(run("grpo-math", actor, f"{teacher}{policy}", "schedule=rollout"))
    golden.check(" ".join(idle))


@pytest.mark.parametrize("reader", ["teachers.big", "ref", "critic"])
def test_a_reader_of_other_tokens_is_refused(policy: Path, tmp_path: Path, reader: str) -> None:
    other = make_policy(tmp_path / "other")
    read = json.loads((other / "tokenizer.json").read_text())
    vocabulary = read["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(read))
    made = run("ppo-math", f"actor.path={policy}", f"{reader}.path={other}")
    golden.check(" ".join(what(made)))
    same = run("ppo-math", f"actor.path={policy}", f"{reader}.path={policy}")
    assert "another tokenizer" not in " ".join(what(same))
