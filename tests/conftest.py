"""Rules of the whole suite: nothing is skipped silently, and nothing reaches beyond this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from real_trials import Trials

pytest.register_assert_rewrite("name_resolve_cases", "real_trials")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is imported; see the supervisor


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may run at the same time (`pytest -n`): files may, but there is one Slurm, and it goes first."""
    here = Path(__file__).parent
    items.sort(key=lambda item: not item.path.is_relative_to(here / "slurm"))  # stable
    for item in items:
        group = "slurm" if item.path.is_relative_to(here / "slurm") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


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
    from realsys.datasets.arithmetic import arithmetic_word_problems
    from realsys.models.tiny_llama import build_tiny_llama

    folder = tmp_path_factory.mktemp("policy") / "tiny"
    problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
    build_tiny_llama(
        folder,
        seed=0,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        corpus=[p["prompt"] + p["answer"] for p in problems],
    )
    return folder
