"""What verbs that only read load: nearly all of their time goes into importing modules.

No times are asserted: benchmarks/house_start.py measures them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from old_trials.unpack import unpack

HEAVY = frozenset(
    {
        *("torch", "transformers", "numpy", "safetensors", "tokenizers", "matplotlib"),
        *("rich", "submitit", "zmq", "etcd3", "grpc", "google", "cryptography", "aiohttp"),
        *("asyncio", "ssl", "multiprocessing", "concurrent"),
    }
)
OF_SETTINGS = frozenset({"typer", "pydantic", "yaml"})


def modules_after(*words: str) -> set[str]:
    """All modules that a fresh interpreter has after one command line."""
    code = (
        "import sys\n"
        "from launcher.cli.entry import main\n"
        f"status = main({list(words)!r})\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stderr.splitlines()[-1].split())


def within(modules: set[str], *rooms: str) -> set[str]:
    """Those of ``modules`` that are in the rooms, without the rooms themselves."""
    return {name for name in modules if name.startswith(tuple(f"{room}." for room in rooms))}


@pytest.fixture
def trial(file_root: Path) -> str:
    unpack("finished", file_root)
    return "/".join(next(file_root.glob("runs/*/*/*/plan.json")).parts[-3:-1])


@pytest.mark.parametrize("verb", ["status", "ls"])
def test_looking_at_trials_loads_no_planner_and_nothing_that_acts(verb: str, trial: str) -> None:
    loaded = modules_after(verb, *([trial] if verb == "status" else []))
    assert {name.partition(".")[0] for name in loaded} & (HEAVY | OF_SETTINGS) == set()
    rooms = ("launcher.plan", "realsys.planner", "realsys.observability.pictures", "experiments")
    assert within(loaded, *rooms) == set()
    acting = ("launcher.submit", "launcher.control", "launcher.job", "realsys.supervisor")
    assert within(loaded, *acting) <= {  # pure, of what Slurm says of a job
        "launcher.job.conditions",
        "launcher.job.slurm_datetime",
        "launcher.job.time_spec",
    }
    assert within(loaded, "launcher.cli.verbs") == {"launcher.cli.verbs.quick_verbs"}
    assert within(loaded, "realsys.config") == set()
    assert not {"realsys.api.plan", "realsys.api.cluster", "launcher.sites.clusters"} & loaded


@pytest.mark.thorough
@pytest.mark.usefixtures("file_root")
def test_planning_loads_nothing_that_reads_the_state_of_trials() -> None:
    modules_after("plan", "ppo-math")  # writes the table for Tab
    loaded = modules_after("plan", "ppo-math", "actor.optimizer.lr=1e-5", "seed=2")
    assert {name.partition(".")[0] for name in loaded} & (HEAVY | OF_SETTINGS) == set()
    assert not {"logging", "tempfile", "importlib.metadata", "launcher.job.job_allocation"} & loaded
    assert within(loaded, "realsys.planner.time", "realsys.observability") == set()
    assert not {"experiments.asynchronous", "experiments.detached"} & loaded
    assert within(loaded, "realsys.name_resolve", "realsys.supervisor", "launcher.control") == set()
    assert within(loaded, "launcher.trials") <= {
        "launcher.trials.copies",
        "launcher.trials.find_trials",
    }
    assert within(loaded, "launcher.submit") == {
        "launcher.submit.job_options",
        "launcher.submit.planning",
        "launcher.submit.setting_table",
    }
    assert "compileall" not in loaded
    assert within(loaded, "launcher.cli.verbs") == {"launcher.cli.verbs.quick_verbs"}
