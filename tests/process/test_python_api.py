"""The Python API: its page runs as it stands there, and mistakes are errors before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import golden
import pytest
from real_trials import Trials

import realsys
from launcher.python_api import settings_words
from launcher.submit.planning import default_experiment
from realsys.api.errors import ConfigError, ConfigErrors, NoSuchTrial
from realsys.config.overrides import apply_overrides
from realsys.config.settings import read_words

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.fixture
def at_home(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """This process launches under the test's file root."""
    for name, value in trials.environment.items():
        monkeypatch.setenv(name, value)
    return trials


def test_the_page_runs_as_written(trials: Trials, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=trials.environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sft-math/run1 ")
    assert "completed" in done.stdout
    assert trials.files("sft-math", "run1").plan.is_file()


def test_all_mistakes_are_told_at_once_and_nothing_is_started(at_home: Trials) -> None:
    with pytest.raises(ConfigErrors) as caught:
        realsys.launch("sft-math", {"seeed": 1}, model={"optimizer": {"lr": "fast"}})
    text = str(caught.value)
    assert "seeed" in text
    assert "model.optimizer.lr" in text
    assert list(realsys.trials()) == []


@pytest.mark.parametrize("value", [object(), {1, 2}, float], ids=["object", "set", "type"])
def test_a_value_that_no_setting_can_have_is_named(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        realsys.launch("sft-math", seed=value)
    assert "seed" in caught.value.where


def test_an_unknown_option_of_the_job_is_refused() -> None:
    with golden.raises(ConfigError):
        realsys.launch("sft-math", slurm={"partitoin": "a100"})


def test_requeue_is_true_or_false() -> None:
    with golden.raises(ConfigError):
        realsys.launch("sft-math", slurm={"requeue": "yes"})


def test_values_arrive_as_they_were_given() -> None:
    words = list(
        settings_words(
            {
                "actor.optimizer.lr": 1e-5,
                "schedule": "async",
                "schedule.max_in_flight": None,
                "tensorboard": False,
                "actor": {"path": Path("/models/a b")},
                "placement": {"pools": {"left": "0-3"}},
            }
        )
    )
    problems: list[ConfigError] = []
    read = list(read_words(words, problems))
    found = apply_overrides(default_experiment("ppo-math"), read)
    assert [*problems, *found.problems] == []
    options = found.options
    assert (options.actor.optimizer.lr, options.actor.path) == (1e-5, "/models/a b")
    assert (
        *(options.schedule.kind, options.schedule.max_in_flight, options.tensorboard),
        dict(options.placement.pools),
    ) == (
        *("async", None, False),
        {"left": "0-3"},
    )


def test_an_unknown_trial_is_no_trial(at_home: Trials) -> None:
    with pytest.raises(NoSuchTrial):
        realsys.Trial("sft-math/run7")


def test_importing_loads_neither_torch_nor_the_launcher() -> None:
    code = (
        "import sys, realsys; assert 'torch' not in sys.modules and 'launcher' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = "import sys, realsys; realsys.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
