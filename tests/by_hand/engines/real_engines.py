"""The conformance suite on real SGLang and vLLM servers, through our front: `make test-engines`.

Not collected by itself: each needs an environment of gigabytes (env/install) that `make test` must not. A
file named by REALSYS_ENGINE_RESULTS gets a line of JSON for each case; a run of all of them writes
results/real_engines.json, which is committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import HandCheck
from engines.conformance import CASES, PROMPT, S, Served, request, run_case
from engines.serve import KEY, server_process
from engines.small_models import make_models
from full_client import FullClient
from real_trials import Trials

from realsys.observability.metrics import read_metrics

ENVIRONMENTS = Path(os.environ.get("REALSYS_ENGINES", Path(__file__).parents[3] / ".engines"))
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


outcomes: dict[str, dict[str, str]] = {kind: {} for kind in CPU}
TRAINS = "trains"  # a launch on the engine


@pytest.fixture(scope="module", autouse=True)
def result() -> Iterator[None]:
    """Is written where every case was run on each engine."""
    check = HandCheck(__file__)
    yield
    fleets = {"a_fleet_draws_its_own_numbers", "new_weights_are_used, no file", TRAINS}
    if all({*CASES, *fleets} <= set(found) for found in outcomes.values()):
        problems = [
            f"{kind}: {case} {outcome}"
            for kind, found in outcomes.items()
            for case, outcome in found.items()
            if outcome != "passes"
        ]
        Path(__file__).with_name("results").mkdir(exist_ok=True)
        command = "python -m pytest --timeout 900 tests/by_hand/engines/real_engines.py"
        check.write(
            "the conformance suite on real servers", problems, command=command, cases=outcomes
        )


def config_of(kind: str, model: Path) -> dict[str, Any]:
    """A server of this kind in its own environment."""
    python = ENVIRONMENTS / kind / "bin/python"
    assert python.exists(), (
        f"no {python}: run tests/by_hand/engines/env/install {kind} {python.parents[1]}"
    )
    args = {"python": str(python), **CPU[kind]}
    return {"backend_type": kind, "model_path": str(model), "backend_args": args}


@pytest.fixture(scope="module", params=list(CPU))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind = request.param
    first, second = make_models(tmp_path_factory.mktemp("models"))
    config = config_of(kind, first.path)
    held = [str(first.path), str(second.path)]
    with server_process(tmp_path_factory.mktemp(kind), config, held=held) as (url, _):
        yield Served(
            url=url,
            key=KEY,
            first=first,
            second=second,
            exact=False,
            position=False,
            seeds=kind == "vllm",
            stop_texts=False,
            in_memory=True,
        )


@pytest.mark.parametrize("name", CASES)
def test_real(name: str, served: Served, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["served"]
    with noted(kind, name):
        asyncio.run(run_case(name, served))


@pytest.mark.parametrize("name", [name for name in CASES if "weights" in name])
def test_real_through_a_folder(name: str, served: Served, request: pytest.FixtureRequest) -> None:
    """What is left for engines that can't read our memory: the trainers' folder."""
    kind = request.node.callspec.params["served"]
    with noted(kind, f"{name}, folder"):
        asyncio.run(run_case(name, replace(served, in_memory=False)))


def test_real_without_any_folder(served: Served, request: pytest.FixtureRequest) -> None:
    """No file of the new weights is there, nor of those that it started with."""
    kind = request.node.callspec.params["served"]
    models = [served.first.path, served.second.path]
    assert all(model.logprobs([5], [9]) for model in (served.first, served.second))  # read
    weights = [file for path in models for file in path.glob("*.safetensors")]
    assert len(weights) == 2
    with noted(kind, "new_weights_are_used, no file"):
        for file in weights:
            _empty(file)
        asyncio.run(run_case("new_weights_are_used", served))


@pytest.mark.parametrize("kind", CPU)
def test_real_fleet(kind: str, tmp_path: Path) -> None:
    """Servers of one run, with one seed, asked the same by requests without a seed."""
    first, _ = make_models(tmp_path / "models")
    config = {**config_of(kind, first.path), "base_seed": 7}
    drawn = []
    with noted(kind, "a_fleet_draws_its_own_numbers"):
        for name in ("generation_server/0", "generation_server/1"):
            (folder := tmp_path / name).mkdir(parents=True)
            with server_process(folder, config, name=name) as (url, _):
                drawn.append(asyncio.run(_answers(url, name)))
        assert len(set(drawn[0]) | set(drawn[1])) == 2 * len(drawn[0])


async def _answers(url: str, name: str) -> list[tuple[int, ...]]:
    client = FullClient(url, KEY, name=name)
    try:
        asked = [request(f"{name}-{i}", PROMPT, max_new_tokens=12) for i in range(4)]
        return [tuple((await client.generate(r, timeout_s=S)).output_ids) for r in asked]
    finally:
        await client.close()


def _empty(file: Path) -> None:
    """Leaves the header, by which weights are checked, and the file's length: all numbers are 0."""
    with file.open("rb") as stream:
        length = stream.read(8)
        header = length + stream.read(int.from_bytes(length, "little"))
    draft = file.with_suffix(".draft")
    draft.write_bytes(header)
    os.truncate(draft, file.stat().st_size)
    draft.replace(file)  # what transformers has mapped here stays


@contextmanager
def noted(kind: str, case: str) -> Iterator[None]:
    """Notes how the case went."""
    began_s, outcome = time.monotonic(), "fails"
    try:
        yield
        outcome = "passes"
    finally:
        outcomes[kind][case] = outcome
        if path := os.environ.get("REALSYS_ENGINE_RESULTS"):
            line = {"engine": kind, "case": case, "outcome": outcome}
            with open(path, "a") as file:
                file.write(json.dumps({**line, "seconds": time.monotonic() - began_s}) + "\n")


def test_the_pages_example_trains(tmp_path: Path) -> None:
    """`realsys launch` with the page's own file, in the environment as `install` makes it."""
    page = (Path(__file__).parents[3] / "docs/generation_servers.md").read_text()
    (example,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, re.S) if "vllm" in b]
    assert "/path/to/vllm/" in example
    with noted("vllm", TRAINS):
        trains(tmp_path, example.replace("/path/to/vllm", str(ENVIRONMENTS / "vllm")))


def test_sglang_trains(tmp_path: Path) -> None:
    """Weights of real trainers, in pieces of each, to a SGLang that answers meanwhile."""
    args = {"python": str(ENVIRONMENTS / "sglang/bin/python"), **CPU["sglang"]}
    schedule = {"server_backend": "sglang", "flush_request_timeout": 300, "server_args": args}
    with noted("sglang", TRAINS):
        trains(tmp_path, json.dumps({"schedule": schedule}))  # JSON is YAML


def trains(tmp_path: Path, config: str) -> None:
    """Three steps with these settings, and no folder of weights after the first."""
    file = tmp_path / "engine.yaml"
    file.write_text(config)
    trials = Trials(tmp_path / "root")
    short = ("exp_ctrl.benchmark_steps=3", "sft.task.train_size=960")
    words = ("launch", "ppo-math-async", "--config", str(file), *short)
    try:
        done = trials.run(*words, timeout_s=800)
    finally:
        trials.end_all()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed after" in done.stderr
    files = trials.files("ppo-math-async", "run1")
    rows = [row for row in read_metrics(files.phase(files.root).metrics) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not list(files.root.rglob("version-0*")), "weights went through the shared file system"
    (log,) = files.root.glob("attempts/*/logs/generation_server-0.log")
    taken = re.findall(r"weights updated version=(\d+) .* bytes=(\d+)", log.read_text())
    assert [int(version) for version, _ in taken] == sorted({int(version) for version, _ in taken})
    assert len(taken) >= 2
    assert all(int(num_bytes) > 0 for _, num_bytes in taken)
