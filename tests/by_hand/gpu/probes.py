"""What a GPU says about the parts that read well: each probe gives figures or its error.

``python tests/by_hand/gpu/probes.py cuda|cpu FILE [NAME …]``, in one process; kit.py starts it. A probe
asserts what must be so on any device, and measures the rest.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import probed_shapes  # noqa: F401 - registers its probes
import suspects  # noqa: F401 - likewise
from device import Device, GiB
from models import (
    batch_of,
    causal_lm,
    fsdp_engine,
    megatron_engine,
    publisher_of,
    shape_of_qwen,
    shape_of_qwen_7b,
    shape_of_small,
)
from registry import PROBES, Figures, probe

from realsys.api.data import MicroBatchSpec
from realsys.api.model import GenerationHyperparameters
from realsys.backends.kernels.packed_attention import run_packed
from realsys.devices.cuda_settings import apply, settings_for
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.engine_requests import GenerationRequest
from realsys.interfaces.answers import num_answer_tokens
from realsys.interfaces.supervised import next_token_loss

# ---- the device itself -----------------------------------------------------------------------------------


@probe
def machine(device: Device) -> Figures:
    """Versions, and what all else is measured against: a matrix product, copies, what a launch costs."""
    names = ("torch", "transformers", "numpy", "pydantic", "msgspec", "pyzmq", "megatron-core")
    found: Figures = {"python": platform.python_version(), "cores": os.cpu_count()}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    n = 256 if device.small else 8192
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(n, n, device=device.kind, dtype=dtype)
        ms = device.milliseconds(lambda x=x: x @ x)
        found[f"matmul_{str(dtype)[6:]}_tflops"] = round(2 * n**3 / ms / 1e9, 2)
    source = torch.empty(n * n, device=device.kind, dtype=torch.float32)
    target = torch.empty_like(source)
    ms = device.milliseconds(lambda: target.copy_(source))
    found["copy_gb_s"] = round(2 * source.nbytes / ms / 1e6, 1)
    host = torch.empty(source.shape, dtype=torch.float32, pin_memory=not device.small)
    ms = device.milliseconds(lambda: target.copy_(host))
    found["host_to_device_gb_s"] = round(host.nbytes / ms / 1e6, 1)
    one = torch.ones(16, device=device.kind)

    @torch.inference_mode()
    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    found["launch_us"] = round(device.milliseconds(launches), 2)
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": torch.cuda.nccl.version(),
            "free_gib": round(free / GiB, 1),
            "total_gib": round(total / GiB, 1),
            "sdpa_order": torch._C._get_sdp_priority_order(),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        }
    return found


# ---- generation ------------------------------------------------------------------------------------------


def _engine_of(module: Any, *, rows: int) -> ContinuousEngine:
    return ContinuousEngine(module, max_running=rows, keep_answers=False, prefix_bytes=0)


def _submit(engine: ContinuousEngine, lengths: list[int], new_tokens: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for i, length in enumerate(lengths):
        prompt = tuple(torch.randint(3, 1000, (length,), generator=draw).tolist())
        gconfig = GenerationHyperparameters(max_new_tokens=new_tokens)
        engine.submit(GenerationRequest(rid=str(i), prompt=prompt, gconfig=gconfig, seed=i))


@contextmanager
def _counted_syncs(device: Device) -> Any:
    """A list with one entry for each time that the CPU waited for the GPU."""
    found: list[str] = []
    if device.kind != "cuda":
        yield found
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@probe
def decode(device: Device) -> Figures:
    """A step of the embedded engine in ms, of equal and of spread rows; how often it waits for the GPU."""
    module = causal_lm(shape_of_small() if device.small else shape_of_qwen_7b(layers=4), device)
    found: Figures = {"layers": module.config.num_hidden_layers}
    steps = 2 if device.small else 20
    for rows in (1, 4) if device.small else (1, 64, 256):
        longest = 40 if device.small else 2000
        for kind, lengths in {
            "equal": [longest // 2] * rows,
            "spread": [max(4, longest * (i + 1) // rows) for i in range(rows)],
        }.items():
            engine = _engine_of(module, rows=rows)
            _submit(engine, lengths, new_tokens=steps + 4)
            read_ms = device.seconds(engine.step) * 1e3
            engine.step()
            found[f"{kind}_{rows}_ms"] = round(device.seconds(engine.step, times=steps) * 1e3, 3)
            found[f"{kind}_{rows}_read_ms"] = round(read_ms, 1)
            with _counted_syncs(device) as syncs:
                engine.step()
            found[f"{kind}_{rows}_syncs"] = len(syncs)
            assert engine.num_running == rows, "rows ended before their length"
    return found


@probe
def prefill(device: Device) -> Figures:
    """One long text read by the embedded engine: tokens a second."""
    module = causal_lm(shape_of_small() if device.small else shape_of_qwen_7b(layers=4), device)
    length = 64 if device.small else 8192
    found: Figures = {"tokens": length}
    for time_ in ("first", "again"):
        engine = _engine_of(module, rows=1)
        _submit(engine, [length], new_tokens=4)
        with device.peak() as peak:
            found[f"{time_}_s"] = round(device.seconds(engine.step), 4)
            found[f"{time_}_peak_gib"] = round(peak() / GiB, 2)
    return found


@probe
def sampled_against_trained(device: Device) -> Figures:
    """Log-probs of sampled tokens by the engine and by the pass that trains; bfloat16, key biases of 30."""
    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=4)
    module = causal_lm(shape, device, key_bias=30.0)
    engine = _engine_of(module, rows=8)
    _submit(engine, [20 + i for i in range(8)], new_tokens=8 if device.small else 128)
    prompts = {str(i): 20 + i for i in range(8)}
    ended: dict[str, Any] = {}
    draw = torch.Generator().manual_seed(1)
    texts = {str(i): torch.randint(3, 1000, (20 + i,), generator=draw).tolist() for i in range(8)}
    while engine.num_running or engine.num_waiting:
        ended |= {output.rid: output for output in engine.step() if output.finish}
    rows = [texts[rid] + list(ended[rid].tokens) for rid in prompts]
    tokens = torch.tensor([t for row in rows for t in row], device=device.kind)
    with torch.no_grad():
        logits = run_packed(module, tokens, [[len(row)] for row in rows]).float()
    logprobs = torch.log_softmax(logits, -1)
    worst, begin = 0.0, 0
    for rid, row in zip(prompts, rows, strict=True):
        at = torch.arange(begin + prompts[rid] - 1, begin + len(row) - 1)
        new = torch.tensor(list(ended[rid].tokens))
        trained = logprobs.cpu()[at, new]
        worst = max(worst, float((trained - torch.tensor(list(ended[rid].logprobs))).abs().max()))
        begin += len(row)
    assert worst < 1.0, f"sampled and recomputed log-probs differ by {worst}"
    return {"largest_difference": round(worst, 5)}


# ---- training --------------------------------------------------------------------------------------------


@probe
def attention_shapes(device: Device) -> Figures:
    """Packed attention, forward and backward, of ten sets of lengths: new shapes and again, in ms."""
    module = causal_lm(shape_of_small() if device.small else shape_of_qwen_7b(layers=1), device)
    draw = torch.Generator().manual_seed(3)
    longest, count = (40, 4) if device.small else (4000, 8)
    found: Figures = {}
    for cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        times: dict[str, list[float]] = {"new": [], "again": []}
        for _ in range(1 if device.small else 10):
            lengths = torch.randint(longest // 8, longest, (count,), generator=draw).tolist()
            tokens = torch.randint(3, 1000, (sum(lengths),), generator=draw).to(device.kind)

            def run(tokens: Any = tokens, lengths: Any = lengths) -> None:
                run_packed(module, tokens, [[n] for n in lengths]).float().mean().backward()

            module.requires_grad_(True)
            for kind in times:
                times[kind].append(device.seconds(run) * 1e3)
                module.zero_grad()
        for kind, all_ms in times.items():
            found[f"cudnn_{'on' if cudnn else 'off'}_{kind}_ms"] = round(
                sorted(all_ms)[len(all_ms) // 2], 2
            )
    torch.backends.cuda.enable_cudnn_sdp(False)
    return found


@probe
def masters(device: Device) -> Figures:
    """Share of weights that move in bfloat16 at a learning rate of 1e-6, and in float32."""
    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=1)
    found: Figures = {}
    for dtype in ("bfloat16", "float32"):
        engine = fsdp_engine(causal_lm(shape, device), device, dtype=dtype, lr=1e-6)
        before = {n: [x.clone() for _, x in v] for n, v in engine.held_weights().items()}
        for _ in range(3 if device.small else 10):
            engine.train_batch(
                batch_of([60, 50], shape["vocab_size"]),
                loss_fn=next_token_loss,
                loss_weight_fn=num_answer_tokens,
            )
        moved = total = 0
        for name, parts in engine.held_weights().items():
            for (_, x), old in zip(parts, before[name], strict=True):
                moved, total = moved + int((x != old).sum()), total + x.numel()
        found[f"{dtype}_moved"] = round(moved / total, 4)
        del engine
        device.free_cache()
    assert found["bfloat16_moved"] > 0.9 * found["float32_moved"], found
    return found


@probe
def step_memory(device: Device) -> Figures:
    """Peak of a training step against the planner's terms, at three lengths, with and without recompute."""
    from planned import planned_step_bytes

    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=4)
    found: Figures = {}
    for recompute in (False, True):
        engine = fsdp_engine(
            causal_lm(shape, device), device, dtype="bfloat16", lr=1e-6, recompute=recompute
        )
        for length in (64, 128) if device.small else (2048, 4096, 8192):
            batch = batch_of([length], shape["vocab_size"])

            def step(batch: Any = batch, engine: Any = engine) -> None:
                engine.train_batch(
                    batch,
                    loss_fn=next_token_loss,
                    loss_weight_fn=num_answer_tokens,
                    mb_spec=MicroBatchSpec(),
                )

            step()  # moments are there from now on
            with device.peak() as peak:
                seconds = device.seconds(step)
                key = f"{length}{'_recompute' if recompute else ''}"
                found[f"{key}_gib"] = round(peak() / GiB, 2)
            planned = planned_step_bytes(shape, [length], recompute=recompute)
            found[f"{key}_planned_gib"] = round(planned / GiB, 2)
            found[f"{key}_s"] = round(seconds, 3)
        del engine, step
        device.free_cache()
    return found


@probe
def offload(device: Device) -> Figures:
    """An engine parked in CPU memory and taken back: bits equal, bytes freed, seconds."""
    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=2)
    engine = fsdp_engine(causal_lm(shape, device), device, dtype="bfloat16", lr=1e-6)
    before = engine.state_dict()["weights"]
    held = device.used()
    out_s = device.seconds(engine.offload)
    freed = held - device.used()
    in_s = device.seconds(engine.onload)
    after = engine.state_dict()["weights"]
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    return {"out_s": round(out_s, 2), "in_s": round(in_s, 2), "freed_gib": round(freed / GiB, 2)}


@probe
def megatron_against_fsdp(device: Device) -> Figures:
    """One update by each backend, one process: losses and norms agree; with recompute as well."""
    shape = shape_of_small() if device.small else shape_of_qwen_7b(layers=2)
    batch = batch_of([70, 33, 50], shape["vocab_size"])
    found: Figures = {}
    made = {
        "fsdp": lambda: fsdp_engine(causal_lm(shape, device), device, dtype="bfloat16", lr=1e-4),
        "megatron": lambda: megatron_engine(shape, device, lr=1e-4),
        "megatron_recompute": lambda: megatron_engine(shape, device, lr=1e-4, recompute=True),
    }
    for name, make in made.items():
        engine = make()
        for step in range(2):
            stats = engine.train_batch(
                batch, loss_fn=next_token_loss, loss_weight_fn=num_answer_tokens
            )
            found[f"{name}_loss_{step}"] = round(stats["loss"], 5)
        found[f"{name}_grad_norm"] = round(stats["grad_norm"], 5)
        del engine
        device.free_cache()
    for name in ("megatron", "megatron_recompute"):
        difference = abs(found[f"{name}_loss_1"] - found["fsdp_loss_1"])
        assert difference < 0.02 * found["fsdp_loss_1"], found
    return found


@probe
def publish(device: Device) -> Figures:
    """New weights out of the device's memory, and into a server on it: GB a second, its pause."""
    from realsys.generation.served_engines.staged_weights import stage

    shape = shape_of_small() if device.small else shape_of_qwen("1.5b")
    engine = fsdp_engine(causal_lm(shape, device), device, dtype="bfloat16", lr=1e-6)
    publish_version = publisher_of(engine, causal_lm(shape, device))
    found: Figures = {}
    for version in range(3):
        begin = time.perf_counter()
        num_bytes = publish_version(version)
        found[f"version_{version}_gb_s"] = round(num_bytes / 1e9 / (time.perf_counter() - begin), 3)
    server = causal_lm(shape, device)
    new = {name: x.detach().to("cpu", torch.bfloat16) + 1 for name, x in server.named_parameters()}
    for where, in_host in (("device", False), ("host", True)):
        begin = time.perf_counter()
        staged = stage(server, new, where="here", wait_there=in_host)
        device.sync()
        found[f"staged_on_{where}_s"] = round(time.perf_counter() - begin, 3)
        found[f"paused_from_{where}_s"] = round(device.seconds(staged.switch), 3)
        for name, x in server.named_parameters():
            assert torch.equal(x.cpu(), new[name]), name
        del staged
    return found


@probe
def out_of_memory(device: Device) -> Figures:
    """What is said when the device's memory is full; afterwards the process goes on."""
    if device.kind != "cuda":
        return {"said": "stood in for"}
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.ones(10, device="cuda").sum().item()
    return {"said": said[:160]}


# ---- all of them -----------------------------------------------------------------------------------------


def main(kind: str, file: str, *names: str) -> None:
    """Runs the probes called ``names``, or all; after each writes what is known to ``file``."""
    device, found = Device(kind), []
    torch.manual_seed(0)
    apply(settings_for(kind))  # as a worker
    for name in names or PROBES:
        begin = time.perf_counter()
        said: Mapping[str, Any]
        try:
            said = {"ok": True, "figures": PROBES[name](device)}
        except Exception as error:
            said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc(limit=6)
        device.free_cache()
        seconds = round(time.perf_counter() - begin, 1)
        found.append({"part": name, "seconds": seconds, **said})
        sys.stdout.write(f"{name}: {json.dumps(said)}  {seconds} s\n")
        sys.stdout.flush()
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
