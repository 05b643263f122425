"""The walls: the control plane loads without torch. Who may import whom is in .importlinter (`make check`).

What loads is probed in fresh processes, many modules in each: if all of them together load nothing heavy,
each alone does not.
"""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
import realsys

ROOT = Path(realsys.__file__).parent.parent
HEAVY = ("torch", "transformers", "etcd3", "grpc", "matplotlib", "tensorboard", "wandb", "numpy")


def modules_of(*packages: str) -> list[str]:
    """All modules of packages of this repository."""
    found = []
    for package in packages:
        folder = ROOT.joinpath(*package.split("."))
        inside = pkgutil.walk_packages([str(folder)], prefix=f"{package}.")
        found += [package, *(m.name for m in inside)]
    return found


GROUPS = {
    "launcher": modules_of("launcher"),
    "experiments": modules_of("experiments"),
    "observability": modules_of("realsys.observability"),
    "control plane": [
        *modules_of("realsys.api", "realsys.config", "realsys.trial", "realsys.transport"),
        *modules_of("realsys.runtime", "realsys.heartbeat", "realsys.worker", "realsys.supervisor"),
        *modules_of("realsys.master", "realsys.slurm", "realsys.planner"),
        *(
            m for m in modules_of("realsys.name_resolve") if ".etcd" not in m
        ),  # loaded when asked for
    ],
}

PROBE = """
import importlib, sys
heavy = set({heavy!r})
for name in {modules!r}:
    importlib.import_module(name)
    if found := sorted(heavy & set(sys.modules)):
        sys.exit(f"{{name}} loads {{found}}")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.thorough
@pytest.mark.parametrize("group", GROUPS)
def test_loads_without_torch_and_other_heavy_libraries(group):
    probe = run(PROBE.format(heavy=HEAVY, modules=GROUPS[group]))
    assert probe.returncode == 0, probe.stderr


@pytest.mark.parametrize(
    "module",
    [
        "launcher.cli.command_line",
        "launcher.plan.resolve",
        "experiments.ppo_math",
        "realsys.api.registry",
        "realsys.master.build",
        "realsys.supervisor.supervisor_main",
        "realsys.worker.main",
    ],
)
def test_the_entrances_are_among_the_probed(module):
    assert any(module in names for names in GROUPS.values())


def test_api_needs_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules)\n"
        + "\n".join(f"import {name}" for name in modules_of("realsys.api"))
        + "\nnew = {name.partition('.')[0] for name in set(sys.modules) - before}"
        "\nprint(*sorted(new - {'realsys'} - sys.stdlib_module_names))"
    )
    probe = run(code)
    assert (probe.returncode, probe.stdout.strip()) == (0, ""), probe.stderr


def test_help_loads_no_room_of_the_runtime():
    """`realsys --help` and completion are quick because verbs import what they need when called."""
    probe = run(
        "import sys, launcher.cli.command_line\n"
        "print(*sorted(m for m in sys.modules if m.startswith('realsys.')))"
    )
    assert (probe.returncode, probe.stdout.strip()) == (0, ""), probe.stderr


def test_the_tests_see_this_repositorys_code():
    assert Path(launcher.__file__).parent.parent == ROOT
