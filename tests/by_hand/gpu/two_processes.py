"""Two processes on one GPU, joined by gloo, which takes tensors of a GPU (NCCL refuses two ranks on one).

All code for CUDA runs but NCCL's own: sharded training, weights from one layout to another, dealt answers.
``python tests/by_hand/gpu/two_processes.py cuda|cpu FILE``; kit.py starts it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from device import Device
from models import SPEC, batch_of, causal_lm, model_of, shape_of_qwen_7b, shape_of_small

from realsys.api.model import GenerationHyperparameters, ParallelGroups, ProcessTopology
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.slot_generation import generate_in_slot
from realsys.backends.inference import InferenceBackend
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss
from realsys.models.source import ModuleInMemory
from realsys.weights.realloc.realloc import Reallocator
from realsys.weights.realloc.realloc_plan import plan_realloc
from realsys.weights.realloc.torch_link import TorchLink
from realsys.weights.sync.plan_publish import weights_of

WORLD, TIMEOUT_S = 2, 150.0
Figures = dict[str, Any]


def rank_main(rank: int, kind: str, folder: str) -> None:
    """What each process does; rank 0 writes the figures."""
    torch.set_num_threads(1 if kind == "cpu" else 8)
    device = Device(kind)
    store = dist.FileStore(f"{folder}/rendezvous", WORLD)
    backend = "cpu:gloo,cuda:gloo" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD)
    found = {}
    for part in (sharded_training, dealt_answers):
        begin = time.perf_counter()
        try:
            said: Mapping[str, Any] = {"ok": True, "figures": part(device, rank)}
        except Exception as error:
            said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
        found[part.__name__] = {**said, "seconds": round(time.perf_counter() - begin, 1)}
        if rank == 0:
            rows = [{"part": f"two_{name}", **said} for name, said in found.items()]
            Path(folder, "found.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def sharded_training(device: Device, rank: int) -> Figures:
    """FSDP over two processes learns as one does, and fills a whole copy beside it."""
    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=2)
    topology, group = ProcessTopology(data=WORLD), dist.group.WORLD
    model = model_of(causal_lm(shape, device), device, dtype="bfloat16")
    model.topology, model.rank = topology, rank
    model.groups = ParallelGroups(copy=group, data=group)
    backend = FSDPBackend(optimizer=OptimizerOptions(lr=1e-4))
    layout = backend.layout(ModuleInMemory(model.module), topology)
    engine = backend.initialize(model, SPEC).module
    batch = batch_of([70, 50, 60, 40], shape["vocab_size"])
    mine = batch.take([rank, rank + WORLD])
    losses = [
        engine.train_batch(mine, loss_fn=next_token_loss, loss_weight_fn=num_answer_tokens)["loss"]
        for _ in range(3)
    ]
    assert losses[2] < losses[0], losses
    whole = model_of(causal_lm(shape, device), device, dtype="bfloat16")
    target_layout = InferenceBackend().layout(ModuleInMemory(whole.module), ProcessTopology())
    copy = InferenceBackend().initialize(whole, SPEC).module if rank == 0 else None
    plan = plan_realloc(
        weights_of(target_layout),
        layout,
        [0, 1],
        target_layout,
        [0],
        dtype={w.name: "float32" for w in weights_of(target_layout)},
    )
    began_s = time.monotonic()
    Reallocator(rank, TorchLink(timeout_s=60, device=device.kind)).run(
        plan, engine.held_weights(), copy.held_weights() if copy else None, eta=1.0
    )
    realloc_s = time.monotonic() - began_s
    mine_whole = dict(engine.whole_module().named_parameters())  # a collective
    if copy is not None:
        copy.weights_changed()
        for name, x in copy.module.named_parameters():
            assert torch.equal(x, mine_whole[name].to(x.dtype)), name
    return {"losses": [round(x, 4) for x in losses], "realloc_s": round(realloc_s, 3)}


def dealt_answers(device: Device, rank: int) -> Figures:
    """Each process makes a share of the answers, and both have all."""
    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=2)
    module = causal_lm(shape, device)
    prompts = [torch.arange(5 + i, 15 + 2 * i, device=device.kind) for i in range(6)]
    made = generate_in_slot(
        module,
        prompts,
        GenerationHyperparameters(max_new_tokens=8),
        eos_token_ids=[],
        pad_token_id=0,
        row_seeds=torch.arange(6),
        max_batch=None,
        group=dist.group.WORLD,
    )
    assert [len(x) for x in made.tokens] == [8] * 6
    return {"answers": len(made.tokens), "device": str(made.tokens[0].device)}


def main(kind: str, file: str) -> None:
    """Starts the processes, and ends them when time is up."""
    with tempfile.TemporaryDirectory() as folder:
        # CUDA's state can't be forked; without it a fork saves an import of everything.
        context = multiprocessing.get_context("spawn" if kind == "cuda" else "fork")
        ranks = [
            context.Process(target=rank_main, args=(rank, kind, folder), daemon=True)
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, deadline_s - time.monotonic()))
        for process in ranks:
            process.kill()
        written = Path(folder, "found.json")
        found = json.loads(written.read_text()) if written.exists() else []
        if not found:
            found = [{"part": "two_sharded_training", "ok": False, "error": "ended without a word"}]
        Path(file).write_text(json.dumps(found))
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
