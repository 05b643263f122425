"""The process tier: trials on this machine, with real supervisor, workers, sockets and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_trials import Trials


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is of the process tier, marked or not."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    """Trials under the test's own folder; none of their processes outlives the test."""
    made = Trials(tmp_path / "root")
    yield made
    made.end_all()
