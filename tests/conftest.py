"""Rules of the whole suite: nothing is skipped silently, and nothing reaches beyond this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import pytest

if TYPE_CHECKING:
    from real_trials import Trials

SLURM = "tests/slurm/"
WITHOUT_TRIALS = ("tests/unit", "tests/simulation")
pytest.register_assert_rewrite(
    "live_runs", "name_resolve_cases", "real_trials", "runs_without_store"
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is imported; see the supervisor


def pytest_configure(config: pytest.Config) -> None:
    """One server for all workers of `pytest -n`, which inherit its name."""
    paths = [Path(word.partition("::")[0]).resolve() for word in config.args]
    roots = [config.rootpath / folder for folder in WITHOUT_TRIALS]
    if forked.FOLDER not in os.environ and not all(
        any(path.is_relative_to(root) for root in roots) for path in paths
    ):
        forked.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits longest goes first and leaves room for the rest."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLURM))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 2`: files may run at the same time, but there is one Slurm."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return SLURM if nodeid.startswith(SLURM) else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failed one: this machine can run every tier that is here."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("CI") and skipped:
        names = ", ".join(report.nodeid for report in skipped[:10])
        reporter.write_line(f"skipped in CI, which counts as failed: {names}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    """Trials under the test's own folder; none of their processes outlives the test."""
    from real_trials import Trials

    made = Trials(tmp_path / "root")
    yield made
    made.end_all()


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights with the demo's tokenizer."""
    from real_trials import make_policy

    return make_policy(tmp_path_factory.mktemp("policy") / "tiny")
