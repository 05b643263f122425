"""The formulas by hand, one rate of the device at a time: all else costs nothing."""

from __future__ import annotations

from dataclasses import astuple, replace
from math import inf

import pytest

from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.model import (
    ModelInterfaceAbstraction,
    ModelInterfaceType,
    ModelName,
    ProcessTopology,
)
from realsys.models.shape import ModelShape
from realsys.planner.allocation import CallAllocation
from realsys.planner.gpu_models import DEVICES, Device, Efficiency, device_of
from realsys.planner.meshes import Degrees
from realsys.planner.placed import RoleModel, Workload
from realsys.planner.time import analytic
from realsys.planner.time.analytic import (
    AnalyticCosts,
    bytes_to_receive,
    decode_flops,
    forward_flops,
    matmul_weights,
)
from realsys.planner.time.costs import TableCosts
from realsys.planner.time.simulated_timeline import Overheads

SHAPE = ModelShape(
    family="llama",
    hidden_size=4,
    intermediate_size=6,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=10,
)
N = SHAPE.num_params
W = 2 * N  # bytes in bfloat16
MODEL = RoleModel(shape=SHAPE, backend="megatron", max_tokens_per_mb=8)
SHARDED, FROZEN = replace(MODEL, backend="fsdp"), replace(MODEL, backend="inference")
# 8 sequences of 4 and 12 tokens: 128 a step, 64 an update, which are 16 and 8 micro-batches.
WORK = Workload(sequences=8, prompt_tokens=4, answer_tokens=12, updates=4, epochs=2)
FREE = Device(
    name="x",
    peak_flops=inf,
    peak_flops_float32=inf,
    memory_bandwidth=inf,
    link_bandwidth=inf,
    network_bandwidth=inf,
    host_bandwidth=inf,
    latency_s=0.0,
    launch_s=0.0,
)
COMPUTE, MEMORY = {"peak_flops": 1.0}, {"memory_bandwidth": 1.0}
LINK, NETWORK = {"link_bandwidth": 1.0}, {"network_bandwidth": 1.0}
LAUNCH, LATENCY = {"launch_s": 1.0}, {"latency_s": 1.0}


def at(degrees: str, *, first: int = 0, apart: int = 1) -> CallAllocation:
    topo = ProcessTopology.parse(degrees)
    workers = tuple(range(first, first + topo.world_size * apart, apart))
    return CallAllocation(workers=workers, topology=topo)


def costs(model: RoleModel, rates: dict[str, float]) -> AnalyticCosts:
    return AnalyticCosts(
        roles={"actor": model, "rule": RoleModel(shape=None)},
        workload=WORK,
        device=replace(FREE, **rates),  # type: ignore[arg-type]
        trained=frozenset({"actor", "rule"}),
        efficiency=Efficiency(matmul=0.5, memory=0.5, network=0.5),
    )


def call(kind: str, role: str = "actor") -> MFCDef:
    return MFCDef(
        name=f"{role}_{kind}",
        n_seqs=8,
        interface_type=ModelInterfaceType(kind),
        interface_impl=ModelInterfaceAbstraction("any"),
        model_name=ModelName(role),
        input_keys=(),
        output_keys=(),
    )


def flops(tokens: float) -> float:
    return forward_flops(SHAPE, tokens=tokens, length=16)


@pytest.mark.parametrize(
    ("model", "degrees", "rates", "seconds"),
    [
        (MODEL, "d1t1p1", COMPUTE, 2 * flops(128)),
        (MODEL, "d4t1p1", COMPUTE, 2 * flops(32)),
        (MODEL, "d1t2p1", COMPUTE, flops(128)),
        (MODEL, "d1t1p2", COMPUTE, flops(128) * 17 / 16),  # the bubble
        (MODEL, "d2t1p4", COMPUTE, flops(64) / 2 * 11 / 8),
        (MODEL, "d1t1p1", LAUNCH, 16 * 4),
        (MODEL, "d3t1p1", LAUNCH, 6 * 4),  # 42.7 tokens
        (MODEL, "d1t1p2", LAUNCH, 16 * 2 * 17 / 16),
        (replace(MODEL, max_tokens_per_mb=None), "d1t1p2", LAUNCH, 2 * 2),
        (replace(MODEL, max_tokens_per_mb=1000), "d1t1p1", LAUNCH, 4),
        # Two all-reduces a layer, of 1,024 bytes by half the bandwidth.
        (MODEL, "d1t1p1", LINK, 0),
        (MODEL, "d1t2p1", LINK, 2 * 4 * 1 * 2048),
        (MODEL, "d1t4p1", LINK, 2 * 4 * 1.5 * 2048),
        (MODEL, "d1t2p2", LINK, 2 * 2 * 2048 * 17 / 16 + 2048),
        (MODEL, "d1t1p2", LINK, 2048),
        (MODEL, "d1t2p1", LATENCY, 2 * 4 * 16),
        (MODEL, "d1t1p2", LATENCY, 16),
        (MODEL, "d1t2p2", LATENCY, 2 * 2 * 16 * 17 / 16 + 16),
        (MODEL, "d2t1p1", LINK, 0),
        # Weights are gathered for each micro-batch.
        (SHARDED, "d2t1p1", LINK, 8 * 2 * W / 2),
        (SHARDED, "d4t1p1", LINK, 4 * 2 * W * 3 / 4),
        (SHARDED, "d2t2p1", LINK, 8 * 2 * W / 4 + 2 * 4 * 1024),
        (SHARDED, "d4t1p1", LATENCY, 4),
        (SHARDED, "d1t1p1", LATENCY, 0),
        (MODEL, "d2t2p2", MEMORY, 0),
    ],
)
def test_a_pass(model: RoleModel, degrees: str, rates: dict, seconds: float) -> None:
    assert costs(model, rates).call_s(call("inference"), at(degrees)) == pytest.approx(seconds)


def test_in_pieces_and_in_float32(monkeypatch) -> None:
    monkeypatch.setattr(analytic, "FSDP_WHOLE_BYTES", W)
    assert costs(SHARDED, LATENCY).call_s(call("inference"), at("d2t1p1")) == 8
    whole = 4 * (3 * 4 * W / 2 + N / 2 * (4 + 2)) * 2
    assert costs(SHARDED, LINK).call_s(call("train_step"), at("d2t1p1")) == pytest.approx(whole)
    monkeypatch.setattr(analytic, "FSDP_WHOLE_BYTES", W - 1)
    assert costs(SHARDED, LATENCY).call_s(call("inference"), at("d2t1p1")) == 8 * 4
    # Gradients are reduced in each of four micro-batches of an update, and weights gathered.
    moved = 4 * (3 * 4 * W / 2 + N / 2 * (4 * 4 + 2)) * 2
    assert costs(SHARDED, LINK).call_s(call("train_step"), at("d2t1p1")) == pytest.approx(moved)
    wide = replace(MODEL, dtype="float32")
    for rates, seconds in ((COMPUTE, 0), ({"peak_flops_float32": 1.0}, 2 * flops(128))):
        assert costs(wide, rates).call_s(call("inference"), at("d1t1p1")) == seconds
    assert costs(wide, LINK).call_s(call("inference"), at("d1t2p1")) == 2 * 4 * 4096


@pytest.mark.parametrize(
    ("model", "degrees", "rates", "seconds"),
    [
        (MODEL, "d1t1p1", COMPUTE, 4 * 3 * 2 * flops(64)),
        (replace(MODEL, recompute=True), "d1t1p1", COMPUTE, 4 * 4 * 2 * flops(64)),
        (MODEL, "d1t1p1", LINK, 0),
        (MODEL, "d2t1p1", LINK, 4 * 2 * N * 6 / 2),  # float32 gradients, and the weights
        (MODEL, "d4t1p2", LINK, 4 * 2 * (N / 2 * 6 * 3 / 4 + 3 * 128)),
        (MODEL, "d2t1p1", LATENCY, 4 * 2),
        (MODEL, "d1t1p1", LATENCY, 0),
        (MODEL, "d1t1p1", MEMORY, 4 * 2 * 28 * N),
        (MODEL, "d2t2p2", MEMORY, 4 * 2 * 28 * N / 8),
        (SHARDED, "d2t1p1", LINK, 4 * 2 * (N * 6 / 2 + 3 * 4 * W / 2)),
    ],
)
def test_a_train_step(model: RoleModel, degrees: str, rates: dict, seconds: float) -> None:
    assert costs(model, rates).call_s(call("train_step"), at(degrees)) == pytest.approx(seconds)


def generation_flops(sequences: int) -> float:
    prefill = forward_flops(SHAPE, tokens=4 * sequences, length=4)
    return prefill + 12 * decode_flops(SHAPE, sequences=sequences, length=10)


CACHE = 2 * 4 * 4 * 2  # of a token: key and value of four layers, four numbers of two bytes


@pytest.mark.parametrize(
    ("model", "degrees", "rates", "seconds"),
    [
        (MODEL, "d1t1p1", COMPUTE, 2 * generation_flops(8)),
        (MODEL, "d1t3p1", COMPUTE, 2 * generation_flops(3)),
        (SHARDED, "d2t2p1", COMPUTE, 2 * generation_flops(4)),
        (MODEL, "d1t1p1", LAUNCH, 12 * 4),
        (MODEL, "d1t1p1", MEMORY, 12 * 2 * (W + 8 * 10 * CACHE)),
        (MODEL, "d2t2p1", MEMORY, 12 * 2 * (W + 2 * 10 * CACHE)),
        (MODEL, "d2t1p1", LINK, W),
        (MODEL, "d2t2p1", LINK, 2 * W * 3 / 4),  # the parts that others have
        (MODEL, "d1t1p1", LINK, 0),
        (FROZEN, "d2t2p1", LINK, 0),
        # The slower of both counts.
        (MODEL, "d1t1p1", COMPUTE | MEMORY, 2 * generation_flops(8)),
    ],
)
def test_a_generation(model: RoleModel, degrees: str, rates: dict, seconds: float) -> None:
    assert costs(model, rates).call_s(call("generate"), at(degrees)) == pytest.approx(seconds)


def test_generation_of_nothing_takes_a_step_and_servers_take_waves() -> None:
    none = replace(costs(MODEL, LAUNCH), workload=replace(WORK, answer_tokens=0))
    assert none.call_s(call("generate"), at("d1t1p1")) == 4
    made = costs(FROZEN, LAUNCH)  # 48 s a wave
    for rows, waves in ((None, 1), (0, 1), (9, 1), (8, 1), (4, 2), (3, 8 / 3)):
        found = made.served_s(FROZEN, servers=1, gpus=0, most_rows=rows)
        assert found == pytest.approx(48 * waves)
    made = costs(FROZEN, COMPUTE)
    pair = made.served_s(FROZEN, servers=2, gpus=2, most_rows=None)
    assert pair == pytest.approx(generation_flops(4))


def test_moves() -> None:
    here, there, far = at("d2t1p1"), at("d1t1p1", first=4), at("d1t1p1", first=8)
    sources = {"a": here, "b": there}
    for rates, seconds in ((LATENCY, 2), (LINK, 2 * 64 * 8 * 2), (NETWORK, 0)):
        assert costs(MODEL, rates).fetch_s(call("inference"), here, sources) == seconds
    assert costs(MODEL, NETWORK).fetch_s(call("inference"), far, {"b": there}) == 2 * 128 * 8
    # A worker receives all; two that have it send a half each. With shards each has a half.
    for model, source, target, moved in (
        (MODEL, here, there, W),
        (SHARDED, here, there, W),
        (MODEL, there, here, 2 * W),
        (MODEL, here, here, 0),
        (SHARDED, here, here, W / 2),
        (MODEL, at("d1t2p1"), here, W / 2),
    ):
        assert costs(model, LINK).realloc_s("actor", source, target) == 2 * moved
        latency = float(moved > 0)
        assert costs(model, LATENCY).realloc_s("actor", source, target) == latency
    assert costs(MODEL, NETWORK).realloc_s("actor", there, far) == 2 * W
    # Where copies meet on one worker, it is taken to hold a half of what it needs.
    parts = at("d1t2p1"), at("d1t2p1", first=1)
    assert bytes_to_receive(8.0, *parts, sharded=False) == {1: 2.0, 2: 4.0}
    assert matmul_weights(SHAPE.as_critic())[1] == SHAPE.hidden_size
    bus = {"host_bandwidth": 0.5}
    assert costs(MODEL, bus).offload_s("actor", at("d2t2p1")) == 2 * N * (2 + 12) / 4
    assert replace(costs(MODEL, bus), trained=frozenset()).offload_s("actor", here) == 2 * N
    assert costs(MODEL, bus).offload_s("rule", here) == 0


def test_rules_and_what_waits_for_one_another() -> None:
    made = costs(MODEL, COMPUTE)
    assert made.call_s(call("inference", "rule"), at("d2t1p1")) == 2e-4 * 8 / 2
    together = {
        (model, kind, degrees): costs(model, {}).together(call(kind), at(degrees))
        for model in (MODEL, FROZEN)
        for kind in ("inference", "train_step")
        for degrees in ("d1t1p1", "d2t1p1", "d1t2p1", "d1t1p2")
    }
    alone = [(model.backend, kind, d) for (model, kind, d), is_so in together.items() if not is_so]
    one = [(m, k, "d1t1p1") for m in ("megatron", "inference") for k in ("inference", "train_step")]
    assert sorted(alone) == sorted([*one, ("inference", "inference", "d2t1p1")])
    assert not made.together(call("inference", "rule"), at("d2t1p1"))
    with pytest.raises(ConfigError) as refused:
        made.call_s(call("inference", "ref"), at("d1t1p1"))
    assert "ref" in refused.value.what
    some = TableCosts(calls={}, synchronous=frozenset({"actor_generate"}))
    found = [some.together(call(kind), at("d2t1p1")) for kind in ("generate", "inference")]
    assert found == [True, False]
    assert TableCosts(calls={}).together(call("inference"), at("d2t1p1"))
    place, told = at("d1t1p1"), {"actor": 3.0}
    full = replace(some, realloc=told, offload=told, fetch=3.0)
    for table, seconds in ((TableCosts(calls={}), 0), (full, 3)):
        assert table.realloc_s("actor", place, place) == table.offload_s("actor", place) == seconds
        assert table.fetch_s(call("inference"), place, {}) == seconds
        assert table.realloc_s("ref", place, place) == table.offload_s("ref", place) == 0


def test_figures_of_the_data_sheets_and_defaults() -> None:
    h100 = ("h100", 989e12, 67e12, 3.35e12, 450e9, 50e9, 25e9, 2e-5, 2e-4, 80 * 2**30)
    assert {name: astuple(device) for name, device in DEVICES.items()} == {
        "a100": ("a100", 312e12, 19.5e12, 2e12, 300e9, 25e9, 25e9, 2e-5, 2e-4, 80 * 2**30),
        "h100": h100,
        "h200": ("h200", *h100[1:3], 4.8e12, *h100[4:9], 141e9),
        "b200": ("b200", 2250e12, 75e12, 8e12, 900e9, 50e9, 25e9, 2e-5, 2e-4, 180e9),
        "cpu": ("cpu", 50e9, 50e9, 10e9, 2e9, 1e9, 10e9, 2e-4, 1e-3, 0.0),
    }
    named = [device_of(name).name for name in ("NVIDIA_H200_141GB", "a100-sxm", "cpu")]
    assert named == ["h200", "a100", "cpu"]
    assert astuple(Efficiency()) == (0.45, 0.6, 0.7)
    assert astuple(Degrees()) == (1 << 20, 8, 8)
    made = AnalyticCosts(roles={}, workload=WORK, device=FREE)
    assert (made.overheads, made.trained) == (Overheads(call_s=0.01, step_s=0.05), frozenset())
    assert made.gpus_per_node == 8
    assert astuple(Workload(sequences=1, prompt_tokens=1, answer_tokens=1))[3:] == (1, 1)
    assert astuple(RoleModel(shape=None)) == (None, "bfloat16", "fsdp", False, False, None)
    assert (MODEL.item_bytes, MODEL.weight_bytes, RoleModel(shape=None).weight_bytes) == (2, W, 0)
