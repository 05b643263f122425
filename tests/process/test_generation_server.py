"""The embedded generation server, in a process of its own: the conformance suite, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from engines.conformance import CASES, Served, run_case
from engines.serve import KEY, server_process
from engines.small_models import SmallModel, make_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallModel, SmallModel]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(
    models: tuple[SmallModel, SmallModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    config: dict[str, Any] = {
        "backend_type": "embedded",
        "model_path": str(models[0].path),
        "backend_args": {"num_threads": 1, "max_running": 32},
    }
    with server_process(tmp_path_factory.mktemp("server"), config) as (url, _):
        yield Served(url=url, key=KEY, first=models[0], second=models[1])


@pytest.mark.parametrize("name", CASES)
def test_embedded(name: str, served: Served) -> None:
    asyncio.run(run_case(name, served))
