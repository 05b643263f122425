"""The conformance suite on real SGLang and vLLM servers, through our front: `make test-engines`.

Not collected by itself: each needs an environment of gigabytes (env/install) that `make test` must not. A
file named by REALSYS_ENGINE_RESULTS gets a line of JSON for each case.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.conformance import CASES, Served, run_case
from engines.serve import KEY, server_process
from engines.small_models import make_models
from real_trials import Trials

from realsys.observability.metrics import read_metrics

ENVIRONMENTS = Path(os.environ.get("REALSYS_ENGINES", Path(__file__).parents[2] / ".engines"))
CPU: dict[str, dict[str, Any]] = {
    "sglang": {
        "env": {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "2",
        },
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.2,
        "max_total_tokens": 16384,
        "max_running_requests": 64,
    },
    "vllm": {
        "env": {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "2",
        },
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 64,
    },
}


@pytest.fixture(scope="module", params=list(CPU))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind = request.param
    python = ENVIRONMENTS / kind / "bin/python"
    assert python.exists(), f"no {python}: run tests/engines/env/install {kind} {python.parents[1]}"
    first, second = make_models(tmp_path_factory.mktemp("models"))
    config = {
        "backend_type": kind,
        "model_path": str(first.path),
        "backend_args": {"python": str(python), **CPU[kind]},
    }
    with server_process(tmp_path_factory.mktemp(kind), config) as (url, _):
        yield Served(
            url=url,
            key=KEY,
            first=first,
            second=second,
            exact=False,
            position=False,
            seeds=kind == "vllm",
            stop_texts=False,
        )


@pytest.mark.parametrize("name", CASES)
def test_real(name: str, served: Served, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["served"]
    began_s, outcome = time.monotonic(), "fails"
    try:
        asyncio.run(run_case(name, served))
        outcome = "passes"
    finally:
        if path := os.environ.get("REALSYS_ENGINE_RESULTS"):
            line = {"engine": kind, "case": name, "outcome": outcome}
            with open(path, "a") as file:
                file.write(json.dumps({**line, "seconds": time.monotonic() - began_s}) + "\n")


def test_the_pages_example_trains(tmp_path: Path) -> None:
    """`realsys launch` with the page's own file, in the environment as `install` makes it."""
    page = (Path(__file__).parents[2] / "docs/generation_servers.md").read_text()
    (example,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, re.S) if "vllm" in b]
    assert "/path/to/vllm/" in example
    config = tmp_path / "vllm.yaml"
    config.write_text(example.replace("/path/to/vllm", str(ENVIRONMENTS / "vllm")))
    trials = Trials(tmp_path / "root")
    short = ("exp_ctrl.benchmark_steps=3", "sft.dataset.train_size=960")
    words = ("launch", "ppo-math-async", "--config", str(config), *short)
    try:
        done = trials.run(*words, timeout_s=800)
    finally:
        trials.end_all()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed after" in done.stderr
    files = trials.files("ppo-math-async", "run1")
    rows = [row for row in read_metrics(files.phase(files.root).metrics) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
