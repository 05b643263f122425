"""What the preflight decides, on answers of nvidia-smi and of nodes that are written down here."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import typer
from stand_in_slurm import make_plan

from launcher.cli.verbs import site_verbs
from launcher.job.job_allocation import JobRequest, allocate
from launcher.slurm.doctor.gpu_job import GpuProbeRequest, gpu_findings, gpu_request, outliers
from realsys.api.cluster import ClusterSpec, ContainerSpec, PartitionSpec, SlurmSpec
from realsys.api.plan import JobLayout, LaunchPlan
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.slurm.lost_nodes import lost_nodes
from realsys.slurm.preflight import drive, node_program, node_records, rounds
from realsys.slurm.preflight.drive import ProbeTarget, examine, place_of
from realsys.slurm.preflight.node_records import (
    ProbeRecords,
    StepSeen,
    number,
    own_rows,
    smi_rows,
)
from realsys.slurm.preflight.node_verdicts import (
    Check,
    gpu_troubles,
    has_code_for,
    judge,
    slow,
    slowdowns,
    to_leave_out,
    too_old,
)
from realsys.slurm.preflight.rounds import (
    Wanted,
    bus_bandwidth,
    hold_request,
    look_request,
    pair_rounds,
    reduce_request,
)
from realsys.supervisor.health import preflight_check
from realsys.supervisor.health.preflight_check import failures
from realsys.trial.records import (
    AttemptFiles,
    AttemptRecord,
    ExitMarker,
    Failure,
    PreflightRecord,
    Result,
    TrialFiles,
    read_record,
    write_record,
)

SMI = Path(__file__).parents[1] / "nvidia_smi"


def smi(name: str) -> str:
    return (SMI / f"{name}.csv").read_text()


# ---- nvidia-smi -------------------------------------------------------------------------------


def test_rows_have_names_without_units_and_nothing_that_is_not_told() -> None:
    row = smi_rows(smi("h100"))[7]
    assert row["index"] == "7"
    assert row["clocks.current.sm"] == "1980"
    assert "retired_pages.pending" not in row  # [N/A] on an H100
    assert number(row, "power.draw") == 114.2
    (told,) = smi_rows(smi("unknown"))
    assert set(told) == {
        *("index", "uuid", "name", "driver_version", "compute_cap", "memory.total"),
        *("clocks.current.sm", "clocks.max.sm", "pcie.link.width.current", "pcie.link.width.max"),
    }
    assert smi_rows("") == []
    assert smi_rows("Unable to determine the device handle") == []


@pytest.mark.parametrize(
    ("gpus", "rows", "troubles"),
    [
        ("h100", "rows_well", {}),
        ("unknown", "", {}),
        ("mig", "rows_well", {}),
        ("ecc", "rows_well", {3: ["2 uncorrected ECC errors since the driver was loaded"]}),
        (
            "h100",
            "rows_ill",
            {
                1: ["its spare rows are used up (row remapping failed)"],
                3: ["rows wait to be replaced: it needs a reset"],
            },
        ),
    ],
)
def test_what_the_driver_says_of_memory(
    gpus: str, rows: str, troubles: dict[int, list[str]]
) -> None:
    remapped = {row["gpu_uuid"]: row for row in smi_rows(smi(rows))} if rows else {}
    found = {
        int(row["index"]): gpu_troubles(row, remapped.get(row["uuid"], {}))
        for row in smi_rows(smi(gpus))
    }
    assert {index: words for index, words in found.items() if words} == troubles


@pytest.mark.parametrize(
    ("gpus", "slowed"),
    [
        ("h100", {}),
        ("unknown", {}),
        ("throttled", {6: ["too hot"]}),  # hw_slowdown says no more than that
        ("mig", {1: ["PCIe has 8 of 16 lanes"]}),
    ],
)
def test_what_holds_a_gpu_back(gpus: str, slowed: dict[int, list[str]]) -> None:
    found = {int(row["index"]): slowdowns(row) for row in smi_rows(smi(gpus))}
    assert {index: words for index, words in found.items() if words} == slowed


# ---- torch and CUDA ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "archs", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((8, 9), ["sm_80", "sm_86", "sm_90"], True),  # a minor version later
        ((8, 0), ["sm_86"], False),  # a minor version earlier
        ((9, 0), ["sm_75", "sm_80", "sm_86"], False),
        ((10, 0), ["sm_80", "sm_90", "compute_90"], True),  # PTX, compiled when it is loaded
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f"], False),
        ((7, 5), [], False),
        ((9, 0), ["other", "compute_90"], True),
        ((9, 0), ["sm_100", "compute_91"], False),
    ],
)
def test_whether_a_torch_has_code_for_a_gpu(
    capability: tuple[int, int], archs: list[str], fits: bool
) -> None:
    assert has_code_for(capability, archs) is fits


@pytest.mark.parametrize(
    ("driver", "cuda", "least"),
    [
        ("570.86.10", "13.0", 580),
        ("580.65.06", "13.0", None),
        ("535.104.05", "12.8", None),
        *(
            ("449.1", "11.8", 450),
            ("450.1", "11.8", None),
            ("580", "13.0", None),
            ("579", "13.0", 580),
        ),
        ("524.9", "12.0", 525),
        ("470.57.02", "12.1", 525),
        ("470.57.02", "99.0", None),
        ("", "13.0", None),
    ],
)
def test_drivers_that_a_cuda_needs(driver: str, cuda: str, least: int | None) -> None:
    assert too_old(driver, cuda) == least


# ---- numbers ----------------------------------------------------------------------------------


def test_bus_bandwidth_of_an_all_reduce() -> None:
    # 8 ranks, 512 MiB in 2 ms: 2 · 7/8 · 536870912 B / 0.002 s = 469762048000 B/s
    assert bus_bandwidth(512 << 20, 0.002, 8) == pytest.approx(469762048000.0)
    assert bus_bandwidth(100, 1.0, 2) == 100.0


def test_what_is_far_below_the_median_of_its_kind() -> None:
    rates = {"a": 100.0, "b": 101.0, "c": 99.0, "d": 79.0}
    assert slow(rates, below=0.8) == {"d": (79.0, 99.5)}
    assert slow({**rates, "d": 81.0}, below=0.8) == {}
    assert slow({"a": 100.0, "b": 50.0}, below=0.8) == {"b": (50.0, 75.0)}
    assert slow({"a": 1.0}, below=0.8) == {}
    assert slow({}, below=0.8) == {}
    # One that is far above moves a mean, not a median.
    assert slow({"a": 100.0, "b": 100.0, "c": 1e6}, below=0.8) == {}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 33])
def test_pairs_are_disjoint_in_a_round_and_others_each_time(count: int) -> None:
    nodes = [f"n{i}" for i in range(count)]
    made = pair_rounds(nodes)
    assert 1 <= len(made) <= rounds.MOST_ROUNDS
    for pairs in made:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == count - count % 2
    everybody = [frozenset(pair) for pairs in made for pair in pairs]
    assert len(everybody) == len(set(everybody))
    assert {node for pair in everybody for node in pair} == set(nodes)
    if count <= 4:  # all that there are
        assert len(everybody) == count * (count - 1) // 2


def test_one_node_has_no_pairs() -> None:
    assert pair_rounds(["n1"]) == []


# ---- what nodes say ---------------------------------------------------------------------------


def test_records_come_together_from_lines_of_several_tasks() -> None:
    a, b = json.dumps({"node": "n1", "what": "x"}), json.dumps({"node": "n2", "what": "y"})
    mark = node_records.MARK
    lines = [
        "srun: warning: something",
        f"{mark}n1.1.1 1/2 {a[:7]}",
        f"{mark}n2.1.1 1/2 {b[:9]}",
        f"{mark}n2.1.1 2/2 {b[9:]}",
        f"{mark}n1.1.1 2/2 {a[7:]}",
        f"{mark}n3.1.1 1/2 cut off",
    ]
    found = node_records.records((float(i), line) for i, line in enumerate(lines))
    assert found == [
        {"node": "n2", "what": "y", "heard": 3.0},
        {"node": "n1", "what": "x", "heard": 4.0},
    ]
    assert node_records.other_lines(lines) == ["srun: warning: something"]


def test_both_sides_know_the_same_mark() -> None:
    assert node_records.MARK == node_program.MARK


Record = dict[str, Any]
NODES = ("n1", "n2", "n3", "n4")
TORCH = {
    "version": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "available": True, "count": 1,
    "name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "archs": ["sm_80", "sm_90"],
}  # fmt: skip


def told(node: str, what: str, *, step: str = "look", **more: Any) -> dict[str, Any]:
    return {"node": node, "what": what, "step": step, "at": 110.0, "heard": 110.1, **more}


def node_of(name: str, **more: Any) -> dict[str, Any]:
    facts = {
        "visible": "0,1,2,3,4,5,6,7", "nofile": [1024, 1048576], "memlock": [-1, -1],
        "shm": [64 << 30, 60 << 30], "infiniband": True, "lock": "held", "address": "10.0.0.1",
        "ports": [20001, 20002],
    }  # fmt: skip
    return told(name, "node", **{**facts, **more})


def looked(
    node: str,
    *,
    gpus: str = "h100",
    rows: str = "rows_well",
    load: str = "h100",
    torch: Mapping[str, Any] = TORCH,
    flops: float = 700e12,
    slow_gpu: tuple[int, float] | None = None,
    inside_s: float = 0.002,
    **facts: Any,
) -> list[dict[str, Any]]:
    rates = [flops] * 8
    if slow_gpu:
        rates[slow_gpu[0]] = slow_gpu[1]
    return [
        node_of(node, **facts),
        told(node, "smi", when="before", error="", gpus=smi(gpus), rows=smi(rows)),
        told(node, "smi", when="load", error="", gpus=smi(load), rows=""),
        *(told(node, "torch", gpu=i, **torch) for i in range(8)),
        *(told(node, "matmul", gpu=i, flops=rate) for i, rate in enumerate(rates)),
        told(node, "reduce", gpu=0, nodes=[node], world=8, seconds=inside_s, bytes=512 << 20),
        told(node, "end", of="look"),
    ]


def pair(step: int, a: str, b: str, seconds: float = 0.006) -> dict[str, Any]:
    return told(
        a, "reduce", step=f"reduce {step}", nodes=[a, b], world=16, seconds=seconds, bytes=512 << 20
    )


def everything(
    nodes: Mapping[str, list[dict[str, Any]]], pairs: Sequence[dict[str, Any]] | None = None
) -> ProbeRecords:
    made = pairs
    if made is None:
        made = [pair(i, *one) for i, some in enumerate(pair_rounds(NODES)) for one in some]
        made.append({**pair(3, "n1", "n2", 0.008), "nodes": list(NODES), "world": 32})
    found = [
        told("n1", "held", step="hold", error=""),
        *(r for rs in nodes.values() for r in rs),
        *made,
    ]
    names = ["hold", "look", "reduce 0", "reduce 1", "reduce 2", "reduce 3"]
    steps = [StepSeen(name=name, nodes=NODES, begun=100.0, limit_s=300.0) for name in names]
    return ProbeRecords(records=tuple(found), steps=tuple(steps))


def saying(seen: ProbeRecords, *lines: str) -> ProbeRecords:
    said = {"look": lines, "reduce 0": ("of another step, n2",)}
    return replace(seen, steps=tuple(replace(s, said=said.get(s.name, ())) for s in seen.steps))


WANTED = Wanted(nodes=NODES, processes=8, gpus=8, gpu_type="h100", lock="/f/lock")
WELL = {node: looked(node) for node in NODES}


def bad(seen: ProbeRecords, wanted: Wanted = WANTED) -> dict[str, str]:
    return {check.name: check.what for check in judge(wanted, seen) if not check.ok}


def test_a_site_that_is_well() -> None:
    checks = judge(WANTED, everything(WELL))
    assert [check for check in checks if not check.ok] == []
    assert {check.name: check.what for check in checks} == {
        "nodes": "4 answered: n[1-4]",
        "driver and torch": "torch 2.13.0+cu130 (CUDA 13.0, NCCL 2.28.9), driver 580.65.06",
        "GPUs": "a node has 8 × NVIDIA H100 80GB HBM3",
        "GPU memory": "no uncorrected errors on 32 GPUs",
        "GPU clocks": "32 GPUs are not held back",
        "/dev/shm": "64.0 GiB or more",
        "limits": "memlock and nofile; InfiniBand on 4 nodes",
        "flock": "a lock held on n1 is seen by 3 other nodes",
        "clocks of nodes": "agree, as far as answers tell",
        "matmul": "700 TFLOP/s; bfloat16, 8192 × 8192",
        "all-reduce in a node": "470 GB/s; NCCL, bus bandwidth 2(n-1)/n · 512 MiB / s",
        "all-reduce of pairs": "168 GB/s; NCCL, bus bandwidth 2(n-1)/n · 512 MiB / s",
        "all-reduce of all": "130 GB/s over 4 nodes; NCCL, bus bandwidth 2(n-1)/n · 512 MiB / s",
    }
    assert to_leave_out(checks, NODES) == {}
    assert outliers(checks, WANTED).ok


@pytest.mark.parametrize(
    ("n3", "name", "what"),
    [
        ({"gpus": "ecc"}, "GPU memory",
         "n3: GPU 3: 2 uncorrected ECC errors since the driver was loaded"),
        ({"load": "throttled"}, "GPU clocks", "n3: GPU 6 at 87 °C: too hot"),
        ({"shm": [64 << 20, 64 << 20]}, "/dev/shm", "n3: 64 MiB"),
        ({"memlock": [65536, 65536]}, "limits", "n3: memlock is 64 KiB, and there is InfiniBand"),
        ({"nofile": [1024, 1024]}, "limits", "n3: nofile is 1024"),
        ({"at": 250.0}, "clocks of nodes", "n3: its clock is 139.9 s or more ahead of the one here"),
        ({"at": 40.0}, "clocks of nodes", "n3: its clock is 60.0 s or more behind the one here"),
        ({"slow_gpu": (5, 500e12)}, "matmul", "n3: GPU 5 500 TFLOP/s, the median is 700 TFLOP/s"),
        ({"inside_s": 0.004}, "all-reduce in a node",
         "n3: 235 GB/s, the median is 470 GB/s"),
        ({"torch": {**TORCH, "cuda": None, "version": "2.13.0+cpu"}}, "driver and torch",
         "n3: torch 2.13.0+cpu was built without CUDA"),
        ({"torch": {**TORCH, "archs": ["sm_100"]}}, "driver and torch",
         "n3: torch 2.13.0+cu130 has no code for NVIDIA H100 80GB HBM3 (sm_90), only sm_100"),
        ({"torch": {**TORCH, "available": False, "error": "no CUDA-capable device is detected"}},
         "driver and torch", "n3: torch 2.13.0+cu130 for CUDA 13.0 finds no GPU (driver 580.65.06): "
         "no CUDA-capable device is detected"),
        ({"visible": "0,1,2,3,4,5,6"}, "GPUs", "n3: Slurm gave 7, the site file says 8"),
    ],
)  # fmt: skip
def test_a_node_that_is_ill_is_named_and_left_out(n3: dict[str, Any], name: str, what: str) -> None:
    seen = everything({**WELL, "n3": looked("n3", **n3)})
    assert bad(seen) == {name: what}
    checks = judge(WANTED, seen)
    assert list(to_leave_out(checks, NODES)) == ["n3"]
    finding = outliers(checks, WANTED)
    assert finding.ok is False
    assert finding.fix.endswith("--exclude n3")


def pairs(seconds: Callable[[set[str]], float], nodes: Sequence[str] = NODES) -> list[Record]:
    """All pairs, those without seconds left out, and all nodes together."""
    rounds = enumerate(pair_rounds(nodes))
    taken = [(i, one, seconds(set(one))) for i, some in rounds for one in some]
    together = {**pair(3, nodes[0], nodes[1], 0.008), "nodes": list(nodes), "world": 8 * len(nodes)}
    return [*(pair(i, *one, seconds=s) for i, one, s in taken if s), together]


def ill(node: str, doing: str, why: str = "", of: Sequence[str] = (), **more: Any) -> Record:
    """A GPU's process that broke with ``why`` or, without, fell silent."""
    what = {"what": "broken", "why": why} if why else {"what": "silent"}
    return told(node, gpu=3, doing=doing, nodes=list(of or [node]), **{**what, **more})


def of_driver(
    node: str, gpus: str, *, load: str = "", rows: str = "", error: str = ""
) -> list[Record]:
    """A node's records, where nvidia-smi says that."""
    of = {"before": {"gpus": gpus, "rows": rows}, "load": {"gpus": load or gpus}}
    return [{**r, "error": error, **of[r["when"]]} if r["what"] == "smi" else r for r in WELL[node]]


def with_n3(*records: Record, without: Sequence[str] = (), **facts: Any) -> ProbeRecords:
    """All are well, but n3 has other facts, lacks some records and has others."""
    mine = [r for r in looked("n3", **facts) if r["what"] not in without]
    return everything({**WELL, "n3": [*mine, *records]})


def at_nodes(*values: float) -> Iterable[tuple[str, float]]:
    return zip(NODES, values, strict=True)


THREE = ("n1", "n3", "n4")
HANGS = everything({node: WELL[node] for node in THREE}, pairs(lambda _: 0.006, THREE))
ONE, TWO = replace(WANTED, nodes=("n1",)), replace(WANTED, nodes=("n1", "n2"))
CPU = replace(WANTED, device="cpu", gpus=0, gpu_type=None, processes=2)
QUIET = {n: looked(n, gpus="unknown", rows="unknown", load="unknown") for n in NODES}
NO_SMI = {n: of_driver(n, "", error="no driver") for n in NODES}
HEAD = "index, uuid, name, driver_version, clocks_event_reasons.hw_slowdown, temperature.gpu"
BARE = f"{HEAD}\n" + "".join(f"{i}, U{i}, H100, 580, Not Active, 50\n" for i in range(8))
OTHERS = {**TORCH, "name": "NVIDIA H200"}  # half as fast, and both alike
MIXED = {n: looked(n, torch=OTHERS, flops=350e12, inside_s=0.004) for n in ("n1", "n2")}
NO_ALL = [r for r in pairs(lambda _: 0.006) if len(r["nodes"]) == 2]
N4_BREAKS = [
    ill("n4", "all-reduce", "n4 is out", sorted(one), step=f"reduce {i}")
    for i, one in enumerate(({"n1", "n4"}, {"n2", "n4"}, {"n3", "n4"}))
]
TWO_BREAK = [
    ill("n2", "all-reduce", of=TWO.nodes, step="reduce 0"),
    ill("n1", "all-reduce", "connection refused", TWO.nodes, step="reduce 0"),
]
CASES: dict[str, tuple[Wanted, ProbeRecords]] = {
    "alone": (ONE, everything({"n1": WELL["n1"]}, [])),
    "alone and broken": (ONE, everything({"n1": looked("n1", gpus="ecc", shm=[1 << 20, 0])}, [])),
    "two": (TWO, everything({n: WELL[n] for n in TWO.nodes}, [pair(0, "n1", "n2")])),
    "two do not reach each other": (TWO, everything({n: WELL[n] for n in TWO.nodes}, TWO_BREAK)),
    "one process a node": (replace(WANTED, processes=1), everything(WELL)),
    "CPUs": (CPU, everything(NO_SMI)),
    "CPUs of a site with GPUs": (replace(CPU, gpus=8), everything(NO_SMI)),
    "CPUs beside GPUs": (CPU, everything({n: looked(n, visible="0") for n in NODES})),
    "a busy CPU": (CPU, with_n3(slow_gpu=(5, 1e9), inside_s=2.0)),
    "nobody": (WANTED, everything({}, [])),
    "hangs": (WANTED, HANGS),
    "hangs, and srun said of it": (WANTED, saying(HANGS, "srun: n2: task 1: Exited", "bye, n22")),
    "hangs, and srun said": (WANTED, saying(HANGS, "srun: what", "srun: " + 300 * "x")),
    "begins": (WANTED, with_n3(without=["end"])),
    "a GPU hangs": (WANTED, with_n3(ill("n3", "matmul"), without=["reduce", "matmul"])),
    "a GPU breaks": (WANTED, with_n3(ill("n3", "matmul", "a fault"), ill("n3", "matmul", "more"))),
    "a GPU breaks in the sum": (WANTED, with_n3(ill("n3", "all-reduce", "NCCL"), without=["reduce"])),
    "slow link": (WANTED, everything(WELL, pairs(lambda one: 0.06 if "n4" in one else 0.006))),
    "slow pair": (WANTED, everything(WELL, pairs(lambda one: 0.06 if one == {"n1", "n4"} else 0.006))),
    "slow pair of CPUs": (CPU, everything(WELL, pairs(lambda o: 9 if o == {"n1", "n4"} else 0.006))),
    "a pair breaks": (WANTED, everything(WELL, [*pairs(lambda o: 0.006 * (o != {"n1", "n4"})),
                                                N4_BREAKS[0]])),
    "a link breaks": (WANTED, everything(WELL, [
        *pairs(lambda one: 0.006 * ("n4" not in one and one != {"n1", "n2"})),
        ill("n1", "all-reduce", "another", ("n1", "n2"), step="reduce 2"), *N4_BREAKS])),
    "all together break": (WANTED, everything(WELL, [
        *NO_ALL, ill("n2", "all-reduce", "timeout", NODES, step="reduce 3")])),
    "all together are not done": (WANTED, everything(WELL, NO_ALL)),
    "no pairs": (WANTED, everything(WELL, N4_BREAKS[1:])),
    "rates": (WANTED, everything(
        {n: looked(n, flops=(700 - 9 * i) * 1e12, inside_s=0.002 - i * 1e-4, shm=[(i + 2) << 30, 0])
         for i, n in enumerate(NODES)},
        pairs(lambda one: 0.006 + 0.0001 * len("".join(one).replace("n1", ""))))),
    "two kinds": (WANTED, everything({**WELL, **MIXED})),
    "a slow one of two kinds": (WANTED, everything(
        {**WELL, **MIXED, "n2": looked("n2", torch=OTHERS, flops=100e12, inside_s=0.01)})),
    "fewer GPUs": (WANTED, everything(
        {**WELL, "n2": of_driver("n2", smi("h100").rsplit("\n", 2)[0] + "\n")})),
    "no GPUs": (WANTED, everything({**WELL, "n2": of_driver("n2", "", error="no driver there")})),
    "no GPUs, no word": (WANTED, everything({**WELL, "n2": of_driver("n2", "")})),
    "no nvidia-smi": (WANTED, everything(NO_SMI)),
    "another type": (replace(WANTED, gpu_type="H200"), everything(WELL)),
    "a type that no name has": (replace(WANTED, gpu_type="big"), everything(WELL)),
    "MIG": (replace(WANTED, gpus=2, processes=2),
            everything(WELL | {"n4": looked("n4", gpus="mig", visible="0,1")})),
    "GPUs of other jobs": (replace(ONE, gpus=4, processes=4),
                           everything({"n1": looked("n1", gpus="ecc", visible="4,5,6,7")}, [])),
    "GPUs of ours": (replace(ONE, gpus=4, processes=4),
                     everything({"n1": looked("n1", gpus="ecc", visible="0,1,2,3")}, [])),
    "fewer visible": (WANTED, with_n3(visible="0,1,2,3,4,5,6")),
    "none is said to be visible": (WANTED, with_n3(visible=None)),
    "quiet": (replace(WANTED, gpus=1), everything(QUIET)),
    "slowed before, not told under load": (WANTED, everything(
        {**WELL, "n3": of_driver("n3", BARE.replace("Not Active, 50", "Active, 50", 2), load="-")})),
    "slowed, heat not told": (WANTED, everything(
        {**WELL, "n3": of_driver("n3", BARE, load="index, clocks_event_reasons.hw_slowdown\n4, Active")})),
    "rows wait": (WANTED, everything({**WELL, "n3": of_driver(
        "n3", BARE, rows="gpu_uuid, remapped_rows.pending\nU2, Yes\nU9, Yes")})),
    "shm": (WANTED, everything({n: looked(n, shm=[(1 << 30) - (n > "n2"), 0]) for n in NODES})),
    "shm of all": (WANTED, everything({n: looked(n, shm=[1 << 20, 0]) for n in NODES})),
    "no InfiniBand": (WANTED, with_n3(infiniband=False, memlock=[0, 0])),
    "memlock": (WANTED, everything({
        n: looked(n, memlock=[locked, -1]) for n, locked in at_nodes(0, (1 << 30) - 1, 1 << 30, -1)})),
    "nofile": (WANTED, everything({
        n: looked(n, nofile=[9, files]) for n, files in at_nodes(0, 4095, 4096, -1)})),
    "torch": (WANTED, with_n3(torch={**TORCH, "available": False, "cuda": "13.9", "version": "2"},
                              gpus="unknown", rows="unknown", visible="0")),
    "no code": (WANTED, with_n3(torch={**TORCH, "archs": ["sm_100"], "capability": [8, 6]})),
    "an error": (WANTED, with_n3(torch={**TORCH, "error": "init"})),
    "no driver is known": (WANTED, everything({n: of_driver(n, BARE.replace(" 580", "")) for n in NODES})),
    "not all drivers are known": (WANTED, everything({**WELL, "n3": of_driver("n3", "")})),
    "clocks": (WANTED, everything({n: looked(n, at=at) for n, at in at_nodes(112.2, 112.0, 98.1, 97)})),
    "all GPUs hang": (WANTED, everything(
        {n: [*(r for r in WELL[n] if r["what"] == "node"), ill(n, "CUDA")] for n in NODES}, [])),
}  # fmt: skip


AS_THEY_ARE = ("alone", "two", "CPUs", "one process a node")  # said in full


@pytest.mark.parametrize("case", CASES)
def test_findings(case: str) -> None:
    """Those that differ from a well site's, and which nodes are left out."""

    def lines(checks: Sequence[Check]) -> dict[str, str]:
        words = ((c, (c.what, c.fix, " ".join(c.against), "own" * c.is_own)) for c in checks)
        return {c.name: f"{c.ok} {' | '.join(filter(None, said))}" for c, said in words}

    wanted, seen = CASES[case]
    checks, of_usual = judge(wanted, seen), WANTED if case in AS_THEY_ARE else wanted
    usual = lines(judge(of_usual, everything({n: WELL[n] for n in of_usual.nodes})))
    found = lines(checks)
    changed = {name: line for name, line in found.items() if line != usual.get(name)}
    left_out, absent = to_leave_out(checks, wanted.nodes), usual.keys() - found.keys()
    golden.check({
        **changed, **({"not asked": ", ".join(sorted(absent))} if absent else {}),
        **({"left out": left_out} if left_out else {}), "outliers": outliers(checks, wanted).ok,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("held", "lock", "ok", "what"),
    [
        ("", "", False, "n2 got a lock that n1 held at that time"),
        ("", "[Errno 38] Function not implemented", False,
         "n2 can't lock a file there: [Errno 38] Function not implemented"),
        ("[Errno 37] No locks available", "held", False,
         "n1 can't lock a file there: [Errno 37] No locks available"),
        (None, "", None, "not checked: n1, which was to hold the lock, did not answer"),
    ],
)  # fmt: skip
def test_locks(held: str | None, lock: str, ok: bool | None, what: str) -> None:
    seen = everything({**WELL, "n2": looked("n2", lock=lock)})
    kept = [r for r in seen.records if r["what"] != "held"]
    if held is not None:
        kept.append(told("n1", "held", step="hold", error=held))
    check = next(c for c in judge(WANTED, replace(seen, records=tuple(kept))) if c.name == "flock")
    assert (check.ok, check.what) == (ok, what)


# ---- how it is asked --------------------------------------------------------------------------


def test_groups_meet_at_their_first_node_at_another_port_each_time() -> None:
    said = {n: node_of(n, address=f"10.0.0.{n[1]}") for n in NODES}
    for turn, port in enumerate((20001, 20002, 20001)):
        asked = reduce_request(WANTED, [("n1", "n4"), ("n2", "n3")], said, turn)
        assert asked["groups"] == [
            {"nodes": ["n1", "n4"], "address": "10.0.0.1", "port": port},
            {"nodes": ["n2", "n3"], "address": "10.0.0.2", "port": port},
        ]


@pytest.mark.parametrize(
    ("nodes", "longest_s"),
    [(1, 300), (2, 120 + 300 + 210), (3, 120 + 300 + 4 * 210), (9, 120 + 300 + 4 * 210)],
)
def test_how_long_it_may_take(nodes: int, longest_s: float) -> None:
    assert Wanted(nodes=NODES[:1] * nodes).longest_s == longest_s


def test_what_nodes_are_asked() -> None:
    usual = {
        "device": "cuda", "processes": 8, "gpus": 0, "gpu_type": None, "lock": "", "interface": "",
        "ports": None, "environment": {}, "look_s": 240, "reduce_s": 150, "starts_s": 60,
    }  # fmt: skip
    assert asdict(Wanted(nodes=("n1",))) == {"nodes": ("n1",), **usual}
    cpu = replace(CPU, interface="ib0", ports=(7, 9), environment={"A": "b"}, starts_s=11)
    both = {"environment": {}, "interface": "", "ports": None, "nodes": list(NODES)}
    gpus = {
        **both,
        "device": "cuda",
        "processes": 8,
        "bytes": 512 << 20,
        "matmul_s": 3,
        "reduce_s": 3,
    }
    cpus = {**both, "device": "cpu", "processes": 2, "bytes": 4 << 20, "matmul_s": 0.2,
            "reduce_s": 0.3, "interface": "ib0", "ports": [7, 9], "environment": {"A": "b"}}  # fmt: skip
    look = {"stage": "look", "lock": "/f/lock", "matmul": True, "limit_s": 240}
    assert look_request(WANTED) == {**gpus, **look}
    assert look_request(cpu) == {**cpus, **look}
    assert look_request(replace(WANTED, nodes=("n1",)))["lock"] == ""
    assert hold_request(cpu) == {"stage": "hold", "lock": "/f/lock", "limit_s": 251}
    reduce = {"stage": "reduce", "groups": [], "matmul": False, "limit_s": 150}
    assert reduce_request(cpu, [], {}, 0) == {**cpus, **reduce}


class Noted:
    """Steps that are only noted down; n2 breaks, all others answer."""

    def __init__(self) -> None:
        self.asked, self.held = list[Any](), [{"what": "other"}]

    def start(self, name: str, nodes: Sequence[str], request: Any, limit_s: float) -> Any:
        self.asked.append((name, list(nodes), request, limit_s))
        return SimpleNamespace(records=lambda: self.held)

    def run(self, *step: Any) -> Sequence[Record]:
        self.start(*step)
        ended = [r for n in NODES for r in (node_of(n), told(n, "end"))]
        return [*ended, ill("n2", "CUDA", "no")] if step[0] == "look" else []

    def wait(self, step: Any, *, until: Callable[[], bool]) -> None:
        self.asked.append(until())
        self.held.append({"what": "held"})
        self.asked.append(until())

    def end(self, step: Any) -> None:
        self.asked.append("end")


@pytest.mark.parametrize(
    ("nodes", "lock", "pairs"),
    [
        (NODES, "/f/lock", [[("n3", "n4")], [("n1", "n4")], [("n1", "n3")], [("n1", "n3", "n4")]]),
        (NODES[:3], "", [[("n1", "n3")]]),
        (NODES[:1], "/f/lock", []),
    ],
)
def test_a_node_that_breaks_by_itself_is_in_no_pair(
    nodes: tuple[str, ...], lock: str, pairs: list[list[tuple[str, ...]]]
) -> None:
    wanted, runner = replace(WANTED, nodes=nodes, lock=lock), Noted()
    drive._examine(runner, wanted)  # type: ignore[arg-type]
    facts = {n: node_of(n) for n in nodes}
    hold = [("hold", ["n1"], hold_request(wanted), 120), False, True]
    is_held = bool(lock) and len(nodes) > 1
    assert runner.asked == [
        *(hold if is_held else []), ("look", list(nodes), look_request(wanted), 300),
        *(["end"] if is_held else []),
        *((f"reduce {i}", [n for g in groups for n in g], reduce_request(wanted, groups, facts, i), 210)
          for i, groups in enumerate(pairs)),
    ]  # fmt: skip


def test_the_step_on_the_nodes_runs_in_the_sites_image() -> None:
    spec = ClusterSpec(
        name="lab", scheduler="slurm", file_root="/f", container=ContainerSpec(runtime="apptainer"),
        slurm=SlurmSpec(extra_srun={"network": "ib"}), setup=("export A=1",),
    )  # fmt: skip

    def place(of: ClusterSpec, image: str | None, *, in_shell: bool = True) -> ProbeTarget:
        return place_of(
            of, image, gpu=True, python="/py", in_shell=in_shell, options=("--het-group=1",)
        )

    argv = place(spec, "/i.sif").argv(["n1", "n2"], {"stage": "look"})
    at = argv.index("/i.sif")
    assert argv[: argv.index("--network=ib") + 1] == [
        "srun", "--job-name=preflight", "--nodelist=n[1-2]", "--nodes=2", "--ntasks=2",
        "--ntasks-per-node=1", "--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=0",
        "--wait=0", "--export=ALL", "--input=none", "--het-group=1", "--network=ib",
    ]  # fmt: skip
    assert ("--nv" in argv[:at], argv[at + 1 :]) == (
        True, ["python3", "-c", rounds.program(), '{"stage": "look"}']
    )  # fmt: skip
    assert max(map(len, argv)) < 100_000  # a word of a command line has 128 KiB
    shell = ("bash", "-c", 'export A=1\nexec "$@"', "realsys-doctor", "/py")
    no_runtime = replace(spec, container=ContainerSpec(runtime="none"))
    for of, image in ((spec, None), (no_runtime, "/i.sif")):
        assert place(of, image).command == shell
    assert place(spec, None, in_shell=False).command == ("/py",)
    bare = replace(spec, setup=())
    assert place(bare, None).command == ("/py",)
    modules = place(replace(spec, modules=("cuda/12", "a b")), None).command
    assert modules[:4] == ("bash", "-l", "-c", "module load cuda/12 'a b'\nexport A=1\nexec \"$@\"")
    here = place_of(ClusterSpec(), None, gpu=True, python="/py", in_shell=True)
    assert here == ProbeTarget(by_srun=False, command=("/py",))
    assert here.argv(["n1"], {"a": 1}) == ["/py", "-c", rounds.program(), '{"a": 1}']


def examined(shell: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> ProbeRecords:
    """What comes of a script in Python's place, on one machine."""
    monkeypatch.setattr(drive, "POLL_S", 0.01)
    place = ProbeTarget(by_srun=False, command=("sh", "-c", shell))
    wanted = Wanted(nodes=("here",), look_s=more.pop("look_s", 240.0), starts_s=0.0)
    return examine(wanted, place, {"WORD": "a word"}, **more)


def test_a_steps_records_and_last_lines_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, noted = time.time(), list[list[str]]()
    record = f'{node_records.MARK}n.1 1/1 {{"node": "here", "what": "x"}}'
    script = f"seq 4; echo; echo '{record}'; echo \"$WORD\" >&2; pwd; cat; echo $2"
    seen = examined(script, monkeypatch, note=noted.append)
    ((found,), (step,)) = seen.records, seen.steps
    assert before <= step.begun <= found.pop("heard") <= time.time()  # type: ignore[attr-defined]
    assert found == {"node": "here", "what": "x", "step": "look"}
    request = noted[0][-1]
    wanted = StepSeen(name="look", nodes=("here",), begun=step.begun, limit_s=240.0,
                      said=("3", "4", "a word", "/", request))  # fmt: skip
    assert step == wanted
    assert json.loads(request)["stage"] == "look"


def test_a_step_that_is_late_is_ended_and_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/pid; wait"
    seen = examined(script, monkeypatch, look_s=0.2)
    assert [step.is_late for step in seen.steps] == [True]
    gone((tmp_path / "pid").read_text().split())
    assert examined(script, monkeypatch, goes_on=lambda: False) == ProbeRecords()


def test_the_driver_inside_of_an_allocation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, seen = list[Any](), everything(WELL)
    monkeypatch.setattr(drive, "examine", lambda *args: asked.append(args) or seen)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    monkeypatch.setenv("SLURM_CPU_BIND", "x")
    place = ProbeTarget(by_srun=True, options=("-a",), command=("/py", "-b"))
    for ports in (None, (7, 9)):
        wanted = replace(WANTED, ports=ports)
        request = {"wanted": asdict(replace(wanted, nodes=())), "place": asdict(place)}
        monkeypatch.setattr(sys, "argv", ["drive", json.dumps(request)])
        assert drive.main() == 0
        *told, environ = asked.pop()
        assert told == [wanted, place]
        assert "SLURM_CPU_BIND" not in environ
        expected = json.loads(json.dumps({**asdict(seen), "nodes": NODES}))
        assert json.loads(capsys.readouterr().out) == expected


SPEC = ClusterSpec(
    name="lab",
    scheduler="slurm",
    slurm=SlurmSpec(partition="main", account="me"),
    partitions={
        "main": PartitionSpec(nodes=9, cpus=64, memory_mib=500_000, gpus=8, gpu_type="h100"),
        "cpu": PartitionSpec(nodes=1, cpus=4, memory_mib=4000),
    },
)


def test_the_job_takes_whole_nodes_gpus() -> None:
    asked = gpu_request(SPEC, None, GpuProbeRequest(nodelist="n[1-4]"))
    assert asked == [
        "--partition=main", "--account=me", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=16",
        "--mem=32768M", "--time=23", "--nodelist=n[1-4]", "--gres=gpu:h100:8",
    ]  # fmt: skip
    two = gpu_request(SPEC, None, GpuProbeRequest())
    assert "--nodes=2" in two
    alone = gpu_request(SPEC, "cpu", GpuProbeRequest(gloo=True))
    assert "--nodes=1" in alone
    assert not any("gres" in option for option in alone)


def test_a_partition_without_gpus_is_told(tmp_path: Path) -> None:
    spec = replace(SPEC, file_root=str(tmp_path))
    (finding,) = gpu_findings(spec, "cpu", GpuProbeRequest())
    assert finding.ok is None
    golden.check(finding)


# ---- the program itself, as it runs on a node -------------------------------------------------

FAKE_TORCH = """\
class version: cuda = None
__version__ = "9"
def __getattr__(name):
    import os, time
    with open(os.environ.get("PIDS", os.devnull), "a") as told: told.write(f"{os.getpid()}\\n")
    if os.environ["HANGS"] == "yes": time.sleep(600)
    raise RuntimeError("torch says no")
"""


def test_what_a_node_says_comes_back_though_its_gpus_break(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho index; echo 7\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    wanted = Wanted(nodes=("here",), device="cpu", processes=2, look_s=100.0)
    environ = {
        **os.environ, "PYTHONPATH": str(tmp_path), "HANGS": "no", "SLURMD_NODENAME": "here",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    seen = examine(wanted, ProbeTarget(by_srun=False, command=(sys.executable,)), environ)
    broken = sorted((r for r in seen.records if "doing" in r), key=lambda r: r["gpu"])
    assert [(r["gpu"], r["what"], r["doing"], r["why"]) for r in broken] == [
        (gpu, "broken", "matmul", "RuntimeError: torch says no") for gpu in (0, 1)
    ]
    assert [r["what"] for r in seen.records][-1] == "end"
    node = next(r for r in seen.records if r["what"] == "node")
    assert (node["node"], len(node["ports"]), node["lock"]) == ("here", 8, None)
    before = next(r for r in seen.records if r["what"] == "smi" and r["when"] == "before")
    assert smi_rows(before["gpus"]) == [{"index": "7"}]


# ---- at a job's start -------------------------------------------------------------------------


def marker(found: list[Any]) -> ExitMarker:
    return ExitMarker(
        result=Result.FAILED, attempt=1, ended_at=0.0, phase="main", first_failure=found[0],
        other_failures=tuple(found[1:]),
    )  # fmt: skip


def test_ill_nodes_are_left_out_as_lost_ones_are() -> None:
    ill = {
        "n3": "matmul: GPU 5 500 TFLOP/s, the median is 700 TFLOP/s",
        "n4": "limits: nofile is 9",
    }
    found = failures([], ill, "ppo-math/run1", host="n1", former=[])
    assert [(f.worker, f.host, f.fix) for f in found] == [
        ("preflight", node, "realsys resume ppo-math/run1 --exclude n[3-4]") for node in ill
    ]
    assert list(lost_nodes(marker(found), "n[1-4]")) == ["n3", "n4"]


def test_a_node_that_was_not_left_out_does_not_requeue_the_job_again() -> None:
    found = failures([], {"n3": "limits: nofile is 9"}, "t/1", host="n1", former=["n3"])
    golden.check(found[0].why)
    assert lost_nodes(marker(found), "n[1-4]") == {}
    golden.check(found[0])


def test_what_is_wrong_with_the_site_ends_the_run_and_blames_no_node() -> None:
    checks = [
        Check("matmul", True, "fine"),
        Check("GPU memory", None, "not checked: …", "ask"),
        Check("flock", False, "n2 got a lock that n1 held at that time", "mount it with -o flock"),
    ]
    (found,) = failures(checks, {}, "t/1", host="n1", former=[])
    golden.check(found.why)
    golden.check(found)
    assert lost_nodes(marker([found]), "n[1-4]") == {}
    assert failures(checks[:2], {}, "t/1", host="n1", former=[]) == []


def started(root: Path, layout: JobLayout = JobLayout.SINGLE, **of_job: Any) -> LaunchPlan:
    """A plan for two nodes of eight GPUs, with a site's words."""
    plan = make_plan(
        root, layout=layout, interface="ib0", env_vars={"NCCL_DEBUG": "INFO"}, port_range="7-9",
        setup=("export A=1",), container=ContainerSpec(runtime="apptainer"),
        step={"container_image": "/i.sif", "gpus_per_task": 4.0},
    )  # fmt: skip
    assert plan.job is not None
    gpus = {"gpus_per_node": 8, "gpu_type": "h100"}
    parts = tuple(replace(c, **(gpus if c.nodes == 2 else {})) for c in plan.job.components)
    return replace(plan, job=replace(plan.job, components=parts, **of_job))


def skipped(files: AttemptFiles, environ: Mapping[str, str]) -> int:
    """Notes that the numbers of former steps are used up first."""
    (files.root / "skipped").write_text(environ["SLURM_JOB_NODELIST"])
    return 0


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The environment of a job's first step; what is examined, which finds n2 ill."""
    found: list[tuple[Any, ...]] = []

    def examine(wanted: Wanted, place: ProbeTarget, environ: Mapping[str, str], **more: Any) -> Any:
        more["note"]([*place.command, rounds.program()])
        found.append((wanted, place, environ, more["goes_on"]))
        of = {n: WELL[n] for n in wanted.nodes}
        return everything({**of, **({"n2": looked("n2", gpus="ecc")} if "n2" in of else {})}, [])

    monkeypatch.setattr(preflight_check, "examine", examine)
    monkeypatch.setattr(preflight_check, "skip_former_numbers", skipped)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "n3")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "n[1-2]")
    monkeypatch.setenv("SLURM_CPU_BIND", "x")
    (files := TrialFiles(tmp_path / "run1")).attempt(2).root.mkdir(parents=True)
    files.secrets.mkdir()
    files.task_environment.write_text("export NCCL_A=1\nexport HOME=/h\nexport NCCL_DEBUG=old\n")
    return found


ATTEMPT = AttemptRecord(
    number=2, token="t", host="n1", supervisor_pid=1, supervisor_start=1, started_at=1.0
)


def preflight(plan: LaunchPlan, goes_on: Callable[[], bool] = lambda: True) -> list[Failure]:
    files = TrialFiles(Path(plan.trial_dir))
    return preflight_check.preflight(plan, ATTEMPT, files, files.attempt(2), goes_on)


def test_a_run_is_stopped_by_an_ill_node_if_it_is_to_be(
    tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    files = TrialFiles(tmp_path / "run1")
    assert preflight(started(tmp_path, preflight="off")) == []
    assert preflight(replace(started(tmp_path), job=None)) == []
    assert (asked, files.attempt(2).preflight.exists()) == ([], False)
    assert not (files.attempt(2).root / "skipped").exists()
    assert preflight(started(tmp_path, preflight="stop"), lambda: False) == []  # a stop is asked
    assert preflight(started(tmp_path, preflight="warn")) == []
    assert (files.attempt(2).root / "skipped").read_text() == "n[1-2]"
    record = read_record(PreflightRecord, files.attempt(2).preflight)
    assert record is not None
    assert (record.mode, list(record.ill), len(record.checks)) == ("warn", ["n2"], 13)
    assert record.seconds >= 0
    assert record.at + record.seconds == pytest.approx(time.time(), abs=600)
    (failure,) = preflight(started(tmp_path, preflight="stop"))
    assert (failure.worker, failure.host, failure.pid, failure.kind) == (
        "preflight", "n2", 0, "Preflight"
    )  # fmt: skip
    assert "failed the preflight" in failure.why
    for one in (1, 2, 3):  # the next attempt's says nothing of this one
        write_record(files.attempt(one).preflight, replace(record, ill={f"n{one + 1}": "ill"}))
    (again,) = preflight(started(tmp_path, preflight="stop"))
    assert "found again by" in again.why
    assert "n2" not in preflight_check._formerly_ill(files, replace(ATTEMPT, number=1))


def test_each_component_is_examined_on_its_nodes(
    tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    anywhere = started(tmp_path, preflight="warn")
    preflight(replace(anywhere, cluster=replace(anywhere.cluster, port_range=None, interface=None)))
    ((wanted, *_),) = asked
    assert (wanted.ports, wanted.interface) == (None, "")
    asked.clear()
    (tmp_path / "run1/attempts/0002/steps.jsonl").unlink()
    goes_on = [True].copy
    preflight(started(tmp_path, JobLayout.HET, preflight="warn"), goes_on)  # type: ignore[arg-type]
    (one, here, environ, _), (two, there, _, told) = asked
    usual = {
        "lock": str(tmp_path / "run1/attempts/0002/preflight.lock"), "interface": "ib0",
        "ports": (7, 9), "environment": {"NCCL_A": "1", "NCCL_DEBUG": "INFO"},
    }  # fmt: skip
    assert one == Wanted(nodes=("n3",), device="cpu", processes=2, gpus=0, **usual)
    assert two == Wanted(nodes=("n1", "n2"), processes=8, gpus=8, gpu_type="h100", **usual)
    assert (here.options[0], there.options[0]) == ("--het-group=0", "--het-group=1")
    assert here.command == (sys.executable,)  # the batch script has set it up
    assert {"--nv", "/i.sif", "apptainer"} <= set(there.command)
    assert told is goes_on
    assert "SLURM_CPU_BIND" not in environ
    steps = TrialFiles(tmp_path / "run1").attempt(2).steps.read_text().splitlines()
    assert [(json.loads(line)["step"], len(line) < 3000) for line in steps] == [
        ("preflight", True)
    ] * 2


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,5", ["2", "5"]),
        ("GPU-00000003-0000-4000-8000-0000000000aa", ["3"]),
        ("MIG-5a0c", list("01234567")),  # it can't be told
        (None, list("01234567")),
        ("0,1,2,3,4,5,6,7", list("01234567")),
    ],
)
def test_gpus_of_other_jobs_on_the_node_are_not_judged(
    visible: str | None, indices: list[str]
) -> None:
    assert [row["index"] for row in own_rows(smi_rows(smi("h100")), visible)] == indices


def scheduled() -> dict[str, Any]:
    group = TasksGroup(count=1, scheduling=Scheduling(cpu=1))
    return {"main": ExperimentScheduling(master_worker=group, model_worker=group)}


@pytest.mark.parametrize(
    ("asked", "site", "planned"),
    [
        (None, "off", "off"),
        (None, "warn", "warn"),
        ("stop", "warn", "stop"),
        ("off", "stop", "off"),
    ],
)
def test_a_launchs_preflight_wins_over_the_sites(
    asked: str | None, site: str, planned: str
) -> None:
    spec = replace(SPEC, slurm=replace(SPEC.slurm, preflight=site))
    request = JobRequest(preflight=asked)
    found = allocate(scheduled(), spec, request, trial="t/1", now=datetime(2026, 11, 23))
    assert found.job is not None, found.problems
    assert found.job.preflight == planned


def test_a_word_that_is_no_preflight() -> None:
    request = JobRequest(preflight="stopp")
    found = allocate(scheduled(), SPEC, request, trial="t/1", now=datetime(2026, 11, 23))
    (problem,) = found.problems
    golden.check((problem.what, problem.fix))


def test_options_of_the_measurement_belong_to_it() -> None:
    with golden.raises(typer.BadParameter):
        site_verbs.doctor(nodes=2)
    with golden.raises(typer.BadParameter):
        site_verbs.doctor(cluster="local", gpu=True, nodes=2)


def test_a_stop_that_is_asked_meanwhile_ends_the_step(tmp_path: Path) -> None:
    """What was seen until then comes back, and nothing of it runs on."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    pids = tmp_path / "pids"
    wanted = Wanted(nodes=("here",), device="cpu", processes=2, look_s=60.0)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "HANGS": "yes", "PIDS": str(pids)}
    asked: list[list[str]] = []
    seen = examine(
        wanted,
        ProbeTarget(by_srun=False, command=(sys.executable,)),
        environ,
        goes_on=lambda: not pids.exists() or len(pids.read_text().split()) < 2,
        note=asked.append,
    )
    assert len(asked) == 1
    assert [step.is_late for step in seen.steps] == [False]
    assert next(r["what"] for r in seen.records) == "node"
    gone(pids.read_text().split())


def gone(pids: Sequence[str]) -> None:
    deadline = time.monotonic() + 240  # killed is not yet gone
    while left := [pid for pid in map(int, pids) if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Not as a zombie that nobody has asked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
