"""What the preflight decides, on answers of nvidia-smi and of nodes that are written down here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import golden
import pytest
import typer

from launcher.cli.verbs import site_verbs
from launcher.job.job_allocation import JobRequest, allocate
from launcher.slurm.doctor.gpu_job import GpuProbeRequest, gpu_findings, gpu_request, outliers
from realsys.api.cluster import ClusterSpec, ContainerSpec, PartitionSpec, SlurmSpec
from realsys.api.scheduling import ExperimentScheduling, Scheduling, TasksGroup
from realsys.slurm.lost_nodes import lost_nodes
from realsys.slurm.preflight import node_program, node_records, rounds
from realsys.slurm.preflight.drive import ProbeTarget, examine, place_of
from realsys.slurm.preflight.node_records import (
    ProbeRecords,
    StepSeen,
    able,
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
from realsys.slurm.preflight.rounds import Wanted, bus_bandwidth, pair_rounds, reduce_request
from realsys.supervisor.health.preflight_check import failures
from realsys.trial.records import ExitMarker, Result

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


def test_how_fast_a_cpu_is_says_nothing_of_its_node() -> None:
    busy = looked("n3", slow_gpu=(5, 1e9), inside_s=2.0)
    seen = everything({**WELL, "n3": busy})
    assert set(bad(seen)) == {"matmul", "all-reduce in a node"}
    assert bad(seen, replace(WANTED, device="cpu")) == {}


def test_what_all_nodes_have_in_common_is_the_sites() -> None:
    checks = judge(WANTED, everything({n: looked(n, shm=[1 << 20, 0]) for n in NODES}))
    assert to_leave_out(checks, NODES) == {}
    finding = outliers(checks, WANTED)
    golden.check((finding.ok, finding.what))


def test_gpus_are_compared_with_the_site_file() -> None:
    fewer = smi("h100").rsplit("\n", 2)[0] + "\n"  # nvidia-smi lists seven
    ill = [{**r, "gpus": fewer} if r["what"] == "smi" else r for r in WELL["n2"]]
    seen = everything({**WELL, "n2": ill})
    golden.check(bad(seen))
    other = replace(WANTED, gpu_type="h200")
    golden.check(bad(everything(WELL), other)["GPUs"])
    assert bad(everything(WELL), replace(WANTED, gpu_type="big")) == {}  # no type that a name has
    cut = replace(WANTED, gpus=2, processes=2)
    golden.check(bad(
        everything({**WELL, "n4": looked("n4", gpus="mig", visible="0,1")}), cut
    )["GPUs"])  # # fmt: skip


def test_gpus_that_tell_nothing_are_not_called_well() -> None:
    quiet = {n: looked(n, gpus="unknown", rows="unknown", load="unknown") for n in NODES}
    checks = {c.name: c for c in judge(replace(WANTED, gpus=1), everything(quiet))}
    assert checks["GPU memory"].ok is None
    assert checks["GPU clocks"].ok is None
    golden.check(checks["GPU clocks"])


def test_a_node_that_hangs_hides_nobody() -> None:
    three = {node: WELL[node] for node in ("n1", "n3", "n4")}
    rest = [pair(0, "n1", "n3"), pair(1, "n1", "n4"), pair(2, "n3", "n4")]
    rest.append({**pair(3, "n1", "n3", 0.008), "nodes": ["n1", "n3", "n4"], "world": 24})
    seen = everything(three, rest)
    golden.check(bad(seen))
    said = [replace(s, said=("srun: error: n2: task 1: Exited",)) for s in seen.steps]
    golden.check(bad(replace(seen, steps=tuple(said)))["nodes"])
    golden.check(to_leave_out(judge(WANTED, seen), NODES))


def test_a_gpu_that_hangs_is_named_with_what_it_did() -> None:
    silent = [r for r in WELL["n2"] if r["what"] not in ("reduce", "matmul")]
    silent.append(told("n2", "silent", gpu=4, nodes=["n2"], doing="matmul"))
    seen = everything({**WELL, "n2": silent}, [pair(0, "n1", "n3"), pair(1, "n1", "n4")])
    found = bad(seen)
    golden.check(found["matmul"])
    assert able(NODES, seen.records) == ["n1", "n3", "n4"]


def test_a_slow_link_is_the_nodes_if_all_its_pairs_are_slow() -> None:
    made = [
        pair(i, *one, seconds=0.06 if "n4" in one else 0.006)
        for i, some in enumerate(pair_rounds(NODES))
        for one in some
    ]
    made.append({**pair(3, "n1", "n2", 0.06), "nodes": list(NODES), "world": 32})
    seen = everything(WELL, made)
    golden.check(bad(seen))
    assert list(to_leave_out(judge(WANTED, seen), NODES)) == ["n4"]


def test_one_slow_pair_of_good_nodes_is_no_nodes_fault() -> None:
    made = [
        pair(i, *one, seconds=0.06 if set(one) == {"n1", "n4"} else 0.006)
        for i, some in enumerate(pair_rounds(NODES))
        for one in some
    ]
    made.append({**pair(3, "n1", "n2"), "nodes": list(NODES), "world": 32})
    seen = everything(WELL, made)
    golden.check(bad(seen))
    assert to_leave_out(judge(WANTED, seen), NODES) == {}


def test_two_nodes_that_can_not_reach_each_other() -> None:
    """Nobody can say whose fault it is."""
    two = replace(WANTED, nodes=("n1", "n2"))
    failed = [
        told("n2", "silent", step="reduce 0", gpu=0, nodes=["n1", "n2"], doing="all-reduce"),
        told("n1", "broken", step="reduce 0", gpu=3, nodes=["n1", "n2"], doing="all-reduce",
             why="ncclSystemError: connection refused"),
    ]  # fmt: skip
    seen = everything({n: WELL[n] for n in ("n1", "n2")}, failed)
    assert bad(seen, two) == {
        "all-reduce of pairs": "n1 and n2: all-reduce failed: ncclSystemError: connection refused (on n1)"
    }
    assert to_leave_out(judge(two, seen), two.nodes) == {}


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


def test_the_step_on_the_nodes_runs_in_the_sites_image() -> None:
    spec = ClusterSpec(
        name="lab", scheduler="slurm", file_root="/f", container=ContainerSpec(runtime="apptainer"),
        slurm=SlurmSpec(extra_srun={"network": "ib"}),
    )  # fmt: skip
    place = place_of(spec, "/i.sif", gpu=True, python="/py", in_shell=True)
    argv = place.argv(["n1", "n2"], {"stage": "look"})
    assert argv[:4] == ["srun", "--job-name=preflight", "--nodelist=n[1-2]", "--nodes=2"]
    assert "--network=ib" in argv
    assert argv[argv.index("/i.sif") + 1 :] == [
        "python3",
        "-c",
        rounds.program(),
        '{"stage": "look"}',
    ]
    assert max(map(len, argv)) < 100_000  # a word of a command line has 128 KiB
    bare = place_of(
        replace(spec, setup=("export A=1",)), None, gpu=True, python="/py", in_shell=True
    )
    assert bare.command == ("bash", "-c", 'export A=1\nexec "$@"', "realsys-doctor", "/py")


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


@pytest.mark.parametrize(("hangs", "look_s"), [("yes", 3.0), ("no", 100.0)])
def test_what_a_node_says_comes_back_though_its_gpus_hang_or_break(
    tmp_path: Path, hangs: str, look_s: float
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$1" in *compute_cap*)\n'
        "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;; esac\n"
        'echo "${1#*=}" | cut -d, -f1,2; echo "0, GPU-7"\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    wanted = Wanted(nodes=("here",), device="cpu", processes=2, look_s=look_s)
    environ = {
        **os.environ, "PYTHONPATH": str(tmp_path), "HANGS": hangs, "SLURMD_NODENAME": "here",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    seen = examine(wanted, ProbeTarget(by_srun=False, command=(sys.executable,)), environ)
    ill = sorted((r for r in seen.records if "doing" in r), key=lambda r: r["gpu"])
    assert [(r["gpu"], r["what"]) for r in ill] == [
        (gpu, "silent" if hangs == "yes" else "broken") for gpu in (0, 1)
    ]
    assert [r["what"] for r in seen.records][-1] == "end"
    node = next(r for r in seen.records if r["what"] == "node")
    assert (node["node"], len(node["ports"]), node["lock"]) == ("here", 8, None)
    if hangs == "no":
        assert ill[0]["doing"] == "matmul"
        assert ill[0]["why"] == "RuntimeError: torch says no"
        before = next(r for r in seen.records if r["what"] == "smi" and r["when"] == "before")
        assert smi_rows(before["gpus"]) == [{"index": "0", "uuid": "GPU-7"}]


def test_a_lock_is_seen_by_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    error, handle = node_program.try_lock(path)
    assert error == ""
    probe = (
        "import sys; sys.path.insert(0, sys.argv[1]); import node_program as program; "
        "print(program.try_lock(sys.argv[2])[0])"
    )
    folder = str(Path(node_program.__file__).parent)
    argv = [sys.executable, "-c", probe, folder, path]
    assert subprocess.run(argv, capture_output=True, text=True).stdout.strip() == "held"
    os.close(handle)
    assert subprocess.run(argv, capture_output=True, text=True).stdout.strip() == ""


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


def test_a_broken_gpu_is_its_nodes_though_there_is_no_other_node() -> None:
    one = replace(WANTED, nodes=("n1",))
    seen = everything({"n1": looked("n1", gpus="ecc", shm=[1 << 20, 0])}, [])
    checks = judge(one, seen)
    assert [check.name for check in checks if check.ok is False] == ["GPU memory", "/dev/shm"]
    golden.check(list(to_leave_out(checks, one.nodes).values()))


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


def test_a_job_beside_a_broken_gpu_that_is_not_its_own_runs() -> None:
    half = replace(WANTED, nodes=("n1",), gpus=4, processes=4)
    others = everything({"n1": looked("n1", gpus="ecc", visible="4,5,6,7")}, [])
    assert bad(others, half) == {}
    ours = everything({"n1": looked("n1", gpus="ecc", visible="0,1,2,3")}, [])
    assert list(bad(ours, half)) == ["GPU memory"]


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
    deadline = time.monotonic() + 240  # killed is not yet gone
    while left := [p for p in map(int, pids.read_text().split()) if is_running(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Not as a zombie that nobody has asked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
