"""Rules of the whole suite: nothing is skipped silently, and nothing reaches beyond this machine."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import pytest
from at_once import CHILD, pytest_addoption, pytest_runtestloop  # noqa: F401 - hooks
from by_hand import checks, result_of
from hypothesis import settings
from time_spent import TimeSpent
from tolerance_marks import MARK, holds_tolerance

from realsys.worker.environment import strict_sums

if TYPE_CHECKING:
    from real_trials import Trials

pytest_plugins = ["golden"]
WITHOUT_TRIALS = ("tests/unit", "tests/simulation")
pytest.register_assert_rewrite(
    "live_runs", "name_resolve_cases", "real_trials", "runs_without_store"
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported; see realsys/worker/environment.py.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
for name, value in strict_sums().items():
    os.environ.setdefault(name, value)


def pytest_configure(config: pytest.Config) -> None:
    """Servers for all forks of `pytest --at-once`, which inherit their name."""
    paths = [Path(word.partition("::")[0]).resolve() for word in config.args]
    roots = [config.rootpath / folder for folder in WITHOUT_TRIALS]
    if forked.FOLDER not in os.environ and not all(
        any(path.is_relative_to(root) for root in roots) for path in paths
    ):
        forked.start()
    settings.register_profile("any machine", deadline=None)  # a busy one is no failure
    settings.load_profile("any machine")


# What takes longest is begun first, since a file that is begun last runs alone: minutes, then the folders.
# `make test` tells the files' times.
LONGEST_FIRST = (
    *("tests/slurm/test_slurm_faults.py", "tests/slurm/test_slurm_zombies.py"),
    *("tests/slurm/test_slurm_preflight.py", "tests/slurm/test_slurm_told.py"),
    *("tests/slurm/test_slurm_runs.py", "tests/process/test_curriculum.py"),
    *("tests/process/test_async_trials.py", "tests/process/test_dynamic_sampling_runs.py"),
    *("tests/process/test_attack.py", "tests/process/test_parallel_trials.py"),
    *("tests/process/test_detached_trials.py", "tests/process/test_current_folder.py"),
    *("tests/slurm/", "tests/etcd/", "tests/process/", "tests/simulation/"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """What takes longest goes first; what compares by ``near`` is marked, for `make other-kernels`; of what
    was chosen, `--every N` leaves each n-th."""
    for item in items:
        if isinstance(item, pytest.Function) and holds_tolerance(item.function):
            item.add_marker(MARK)

    def place(item: pytest.Item) -> int:
        return next(
            (i for i, name in enumerate(LONGEST_FIRST) if item.nodeid.startswith(name)),
            len(LONGEST_FIRST),
        )

    items.sort(key=place)  # stable
    yield
    if (every := config.getoption("every")) > 1:
        left_out = [item for number, item in enumerate(items) if number % every]
        items[:] = items[::every]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there now stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    # To each logger that keeps its records to itself pytest adds two handlers, three times a test, and
    # takes them away again: torch has nearly a hundred such.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is named when it happens, not half an hour later."""
    if report.failed and CHILD not in os.environ:
        line = f"\n{report.nodeid} failed ({report.when}, {report.duration:.0f} s)\n"
        os.write(sys.__stdout__.fileno(), line.encode())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failed one: this machine can run every tier that is here."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("CI") and skipped:
        names = ", ".join(report.nodeid for report in skipped[:10])
        reporter.write_line(f"skipped in CI, which counts as failed: {names}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if forked.ended():  # all tests may pass without, but take three times as long
        reporter.write_line("a server of tests/fork_server has ended", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests took; what no run of them looks at, and when somebody did."""
    if spent := terminalreporter.config.stash.get(TimeSpent.KEY, None):
        terminalreporter.section("time")
        for line in spent.lines():
            terminalreporter.write_line(line)
    now = datetime.datetime.now(datetime.UTC)
    terminalreporter.section("checked by hand")
    for check in checks():
        terminalreporter.write_line(result_of(check).line(now))


@pytest.fixture(scope="module", autouse=True)
def plugins_of_one_file() -> Iterator[None]:
    """What the tests of a file register ends with them: the files of their plug-ins are gone."""
    from realsys.api import registry
    from realsys.api.basics import plugin_table

    lists = (registry._imported, registry._entry_points)
    tables = [registry._reward_options, *plugin_table.registered.values()]
    before = [list(names) for names in lists], [dict(table) for table in tables], set(sys.modules)
    yield
    for names, known in zip(lists, before[0], strict=True):
        names[:] = known
    for table, entries in zip(tables, before[1], strict=True):
        table.clear()
        table.update(entries)
    for name in [*sys.modules]:
        if name.startswith(registry._OF_FILES) and name not in before[2]:
            del sys.modules[name]


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    """Trials under the test's own folder; none of their processes outlives the test."""
    from real_trials import Trials

    made = Trials(tmp_path / "root")
    yield made
    made.end_all()


@pytest.fixture
def file_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a file root of our own, and no colours."""
    for name in (
        "REALSYS_CLUSTER",
        "FORCE_COLOR",
        "XDG_CONFIG_HOME",
        "XDG_STATE_HOME",
        "XDG_CACHE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights with the demo's tokenizer."""
    from real_trials import make_policy

    return make_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: of two, each only waits for the other on tensors so small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
