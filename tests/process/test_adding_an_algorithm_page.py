"""The loss and the advantage of docs/adding_an_algorithm.md, and built-in losses, as a user has them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from doc_pages import DocPage, in_folder
from real_trials import Trials, explain, make_policy, metrics_of, small_ppo

from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

PAGE = DocPage("adding_an_algorithm.md")
STEPS = 3
# A random policy is never right: this rule tells its answers apart.
RULE = """
from realsys.api.registry import register_reward

register_reward("odd", lambda token_ids: float(sum(token_ids) % 2))
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A starting policy and a reward."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "odd.py").write_text(RULE)
    policy = make_policy(folder / "policy")
    return "--import", str(folder / "odd.py"), "task.reward=odd", f"actor.path={policy}"


def finished(trials: Trials, experiment: str, name: str, *words: str) -> TrialFiles:
    small = (*small_ppo("gen.max_new_tokens=8"), f"exp_ctrl.benchmark_steps={STEPS}")
    files = trials.launch(experiment, name, *words, *small)
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return files


def assert_trained(files: TrialFiles) -> None:
    rows = [row for row in metrics_of(files) if "actor/actor_loss" in row]
    assert len(rows) == STEPS
    assert all(math.isfinite(float(str(row["actor/actor_loss"]))) for row in rows)
    assert any(float(str(row["actor/grad_norm"])) > 0 for row in rows)


@pytest.mark.parametrize("number", range(4))
def test_the_loss_and_the_advantage_of_the_page(
    module_trials: Trials, start: tuple[str, ...], tmp_path: Path, number: int
) -> None:
    PAGE.write_code(tmp_path, "gmpo.py", "opo.py")
    assert all(len(block.strip().splitlines()) <= 30 for block in PAGE.blocks("python"))
    found = PAGE.commands("launch")
    assert len(found) == 4
    experiment, *words = found[number]
    given = in_folder(tmp_path, words)
    assert_trained(finished(module_trials, experiment, f"own{number}", *given, *start))


def test_a_loss_that_is_built_in(module_trials: Trials, start: tuple[str, ...]) -> None:
    """Of whole answers. The others: tests/unit/algorithms, test_algorithms_alike.py."""
    assert_trained(finished(module_trials, "grpo-math", "gspo", "algorithm.loss=gspo", *start))
