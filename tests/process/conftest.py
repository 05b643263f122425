"""The process tier: trials on this machine, with real supervisor, workers, sockets and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_trials import Trials


@pytest.fixture(scope="module")
def module_trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """One file root for all tests of a module: a starting policy is made once."""
    trials = Trials(tmp_path_factory.mktemp("trials") / "root")
    yield trials
    trials.end_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is of the process tier, marked or not."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.process)
