"""Weights between real processes: every number arrives, over shared memory, gloo, both, and a folder.

One world of four processes runs all cases of a link; each rank checks its own target and writes what it
found. Numbers are those of their places in the model, so that a wrong place shows.
"""

import json
import os
import threading
from pathlib import Path

import golden
import pytest
import torch
import torch.distributed as dist
from parallel_ranks import run_ranks
from weight_sync_world import finer, layout_of

from realsys.api.errors import InternalError, RealsysError, WaitTimeout
from realsys.models.shape import ModelShape
from realsys.weights.layouts.boxes import Box
from realsys.weights.realloc.disk import read_parts, write_part
from realsys.weights.realloc.pairwise_link import PairwiseLink, open_link
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc
from realsys.weights.realloc.rings import NUM_SLOTS, SLOT_BYTES
from realsys.weights.realloc.shared_memory_link import SharedMemoryLink
from realsys.weights.realloc.torch_link import TorchLink

pytestmark = pytest.mark.process
SHAPE = ModelShape(
    family="qwen3",
    hidden_size=64,
    intermediate_size=192,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=96,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)
BIG = ModelShape(  # some MB, so that streams are longer than a ring
    family="llama",
    hidden_size=512,
    intermediate_size=1536,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=4096,
)
# source, its workers, target, its workers
CASES = {
    "d4 to t4": ("fsdp", "d4", (0, 1, 2, 3), "megatron", "t4", (0, 1, 2, 3)),
    "t2p2 to d2t2": ("megatron", "t2p2", (0, 1, 2, 3), "megatron", "d2t2", (3, 1, 0, 2)),
    "p2 to t2, apart": ("megatron", "p2", (0, 1), "megatron", "t2", (2, 3)),
    "d2t2 to whole d3, partly shared": ("fsdp", "d2t2", (0, 1, 2, 3), "whole", "d3", (3, 0, 1)),
    "d1 to p4": ("whole", "d1", (2,), "megatron", "p4", (0, 1, 2, 3)),
    "the same": ("megatron", "d2t2", (0, 1, 2, 3), "megatron", "d2t2", (0, 1, 2, 3)),
}
LINKS = ("shared", "torch", "mixed")


def dense(shape, dtype):
    """Names → weights whose numbers differ; exact in bfloat16 (8 bits) where dtype says so."""
    end, found = 0, {}
    for w in shape.weights():
        x = torch.arange(end, end + w.numel)
        found[w.name] = ((x * 37) % 251).to(dtype).view(w.shape)
        end += w.numel
    return found


def views(holding, whole, dtype):
    """A rank's memory: a tensor a box, some of them parts of a larger one (not contiguous)."""
    found = {}
    for number, (name, boxes) in enumerate(holding.items()):
        found[name] = []
        for box in (part for b in boxes for part in (finer(b) if number % 3 == 0 else [b])):
            x = whole[name][tuple(map(slice, box.start, box.stop))].to(dtype)
            if number % 3 == 1 and x.dim() == 2:  # columns of a fused weight
                fused = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=dtype)
                fused[:, 1::2] = x
                x = fused[:, 1::2]
            else:
                x = x.clone()
            found[name].append((box, x))
    return found


def rank_in(workers, rank):
    return workers.index(rank) if rank in workers else None


class Case:
    """One transfer as one worker sees it."""

    def __init__(self, rank, case, shape, dtypes=(torch.float32, torch.float32)):
        a, topo_a, workers_a, b, topo_b, workers_b = case
        source, target = layout_of(a, topo_a, shape), layout_of(b, topo_b, shape)
        sent = str(dtypes[0]).removeprefix("torch.")
        self.plan = plan_realloc(shape.weights(), source, workers_a, target, workers_b, dtype=sent)
        self.shape, self.dtypes = shape, dtypes
        self.source = self.target = None
        if (at := rank_in(workers_a, rank)) is not None:
            self.source = views(source[at], dense(shape, dtypes[0]), dtypes[0])
        if (at := rank_in(workers_b, rank)) is not None:
            ones = {w.name: torch.ones(w.shape) for w in shape.weights()}
            self.target = views(target[at], ones, dtypes[1])

    def is_right(self, eta=1.0):
        """Whether each number of the target is what it must be; it was 1 before."""
        whole = dense(self.shape, torch.float32)
        for name, parts in (self.target or {}).items():
            for box, x in parts:
                new = whole[name][tuple(map(slice, box.start, box.stop))]
                expected = new if eta == 1 else new * eta + (1 - eta)
                same = torch.equal if eta == 1 else torch.allclose
                if not same(x, expected.to(self.dtypes[1])):
                    return False
        return True


class OddPairsByTorch(SharedMemoryLink):
    """As if workers 1 and 2 were on another host than 0 and 3."""

    def connect(self, sends_to, receives_from):
        def near(peer):
            return (self.worker in (1, 2)) == (peer in (1, 2))

        super().connect(list(filter(near, sends_to)), list(filter(near, receives_from)))


def make_link(kind, rank, store):
    if kind == "torch":
        return TorchLink(timeout_s=60, bucket_bytes=300_000)
    if kind == "mixed":
        near = OddPairsByTorch(rank, store, timeout_s=60)
        return PairwiseLink(near, TorchLink(timeout_s=60, bucket_bytes=300_000))
    return PairwiseLink(SharedMemoryLink(rank, store, timeout_s=60), None)


def rank_main(rank, folder):
    """What each of the four processes runs."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/world", 4), rank=rank, world_size=4
    )
    found = {}
    for kind in LINKS:
        store = dist.FileStore(f"{folder}/{kind}", 4)
        reallocator = Reallocator(rank, make_link(kind, rank, store))
        found |= {f"{name} by {kind}": holds for name, holds in cases(rank, reallocator)}
    run = Case(rank, CASES["p2 to t2, apart"], SHAPE)
    write_part(run.plan, rank, run.source or {}, Path(f"{folder}/disk"))
    read_parts(run.plan, rank, run.target or {}, Path(f"{folder}/disk"), timeout_s=60)
    found["through a folder"] = run.is_right()
    found["no descriptor of shared memory"] = not any("memfd" in d for d in descriptors())
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def cases(rank, reallocator):
    """(what, whether it holds) of all cases by one link."""
    for name, case in CASES.items():
        run = Case(rank, case, SHAPE)
        report = reallocator.run(run.plan, run.source, run.target)
        yield name, run.is_right()
        yield f"{name}: bytes", report.bytes_sent == run.plan.bytes_sent.get(rank, 0)
    for name in ("d4 to t4", "t2p2 to d2t2"):
        run = Case(rank, CASES[name], BIG)
        reallocator.run(run.plan, run.source, run.target)
        yield f"{name}: many buckets", run.is_right()
    for eta in (0.25, 0.999):
        run = Case(rank, CASES["d2t2 to whole d3, partly shared"], SHAPE)
        reallocator.run(run.plan, run.source, run.target, eta=eta)
        yield f"eta {eta}", run.is_right(eta)
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        run = Case(rank, CASES["t2p2 to d2t2"], SHAPE, dtypes)
        reallocator.run(run.plan, run.source, run.target)
        yield f"dtypes {dtypes}", run.is_right()


def descriptors():
    """What this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [
        os.readlink(link) for link in links if os.path.lexists(link)
    ]  # but for the listing itself


def test_every_number_arrives_by_every_link(tmp_path):
    run_ranks("test_realloc", 4, tmp_path)
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert [name for name, holds in found.items() if not holds] == []
        assert len(found) == len(LINKS) * (2 * len(CASES) + 2 + 2 + 2) + 2


def lonely(rank, folder):
    """Worker 1 takes no part: worker 0 must say so."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/world", 2), rank=rank, world_size=2
    )
    store = dist.FileStore(f"{folder}/rings", 2)
    if rank == 0:
        auto = open_link(0, device="cpu", store=store, timeout_s=1)
        told = [
            failure(reallocator)
            for reallocator in (Reallocator(0, auto), Reallocator(0, TorchLink(timeout_s=1)))
            for _ in range(2)
        ]
        Path(f"{folder}/told.json").write_text(json.dumps(told))
        store.set("over", "1")
    store.wait(["over"])
    os._exit(0)  # gloo's own end would wait for the connection that timed out


def failure(reallocator):
    """What a transfer from worker 1 to worker 0 ends with."""
    try:
        reallocator.run(holding_plan(4_000_000, (1, 0)), None, one_view(4_000_000))
    except RealsysError as error:
        return f"{type(error).__name__}: {error.what}"


def test_a_missing_worker_is_named_and_the_link_is_used_no_more(tmp_path):
    run_ranks("test_realloc", 2, tmp_path, main="lonely")
    told = json.loads((tmp_path / "told.json").read_text())
    assert told[::2] == [
        "WaitTimeout: model_worker/1 did not offer memory in 1 s",
        "WaitTimeout: model_worker/1 did not send weights in 1 s",
    ]
    assert all(
        t.startswith("InternalError: an earlier transfer failed half way") for t in told[1::2]
    )


# Shared memory between threads of this process: the same rings, quicker to start.


def two_links(**options):
    store = dist.HashStore()
    return [SharedMemoryLink(worker, store, **options) for worker in range(2)]


def connect(links):
    """Worker 0 sends to worker 1."""
    other = threading.Thread(target=lambda: links[1].connect([], [0]), daemon=True)
    other.start()
    links[0].connect([1], [])
    other.join(240)
    assert not other.is_alive()


def holding_plan(numel, workers=(0, 1), **options):
    holding = {"w": (Box((0,), (numel,)),)}
    return plan_realloc([], (holding,), workers[:1], (holding,), workers[1:], **options)


def one_view(numel, value=0.0):
    return {"w": [(Box((0,), (numel,)), torch.full((numel,), value))]}


def test_a_receiver_that_stops_is_named_and_so_is_a_sender():
    links = two_links(timeout_s=0.2)
    connect(links)
    numel = (NUM_SLOTS + 2) * SLOT_BYTES // 4  # more than the ring holds
    plan = holding_plan(numel)
    with pytest.raises(WaitTimeout, match="model_worker"):
        Reallocator(0, links[0]).run(plan, one_view(numel), None)
    with pytest.raises(WaitTimeout, match="model_worker"):
        Reallocator(1, links[1]).run(plan, None, one_view(numel))


def test_other_weights_than_planned_are_refused():
    links = two_links(timeout_s=240)
    connect(links)
    Reallocator(0, links[0]).run(holding_plan(10), one_view(10), None)
    with golden.raises(InternalError):
        Reallocator(1, links[1]).run(holding_plan(12), None, one_view(12))


def test_a_plan_with_a_narrower_dtype_than_the_weights_is_refused():
    links = two_links(timeout_s=240)
    connect(links)
    with golden.raises(InternalError):
        Reallocator(0, links[0]).run(holding_plan(10, dtype="bfloat16"), one_view(10), None)


def test_views_that_do_not_fit_the_plan_are_refused():
    links = two_links(timeout_s=240)
    connect(links)
    with golden.raises(InternalError):
        Reallocator(0, links[0]).run(holding_plan(10), one_view(9), None)


def test_a_torn_file_is_refused_and_a_missing_one_names_its_writer(tmp_path):
    plan = holding_plan(10)
    with golden.raises(WaitTimeout):
        read_parts(plan, 1, one_view(10), tmp_path, timeout_s=0.1)
    write_part(plan, 0, one_view(10, 3.0), tmp_path)
    target = one_view(10, 1.0)
    read_parts(plan, 1, target, tmp_path, timeout_s=240, eta=0.5)
    assert target["w"][0][1].tolist() == [2.0] * 10
    file = tmp_path / "worker0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with golden.raises(RealsysError):
        read_parts(plan, 1, target, tmp_path, timeout_s=1)
    assert [p.name for p in tmp_path.iterdir()] == ["worker0.safetensors"], "no draft is left"
