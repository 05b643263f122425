"""Probes of whole models' shapes with random weights: equal to a CPU, how fast, what takes the time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from device import Device, GiB
from models import Shape, causal_lm, fsdp_engine, grouped_answers, shape_of_qwen, shape_of_small
from planned import planned_step_bytes
from registry import Figures, probe

from realsys.api.data import MicroBatchSpec
from realsys.api.model import GenerationHyperparameters
from realsys.backends.kernels.packed_attention import predict_packed
from realsys.backends.kernels.packed_pieces import Pieces
from realsys.data.sequence_sample import SequenceSample
from realsys.generation.engine.continuous import ContinuousEngine
from realsys.generation.engine.embedded_engine import generate
from realsys.generation.engine.engine_requests import GenerationRequest
from realsys.interfaces.answers import answer_mask, answer_tokens, num_answer_tokens

PEAK_FLOPS = 989e12  # an H100's and an H200's, bfloat16, dense
KINDS = {
    "matmul": ("gemm", "cutlass", "nvjet", "xmma", "splitk"),
    "attention": ("flash", "fmha", "attention"),
    "index, sort": ("index", "sort", "scatter", "gather", "radix"),
}


def policy_loss(predictions: Any, mb: SequenceSample) -> tuple[torch.Tensor, dict[str, Any]]:
    """Shaped as the actor's: log-probs and entropy of answers, a ratio of 1, an advantage for each."""
    logprobs, entropy = predictions.logprobs_and_entropy(*answer_tokens(mb, answer_mask(mb)))
    advantages = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    loss = -(torch.exp(logprobs - logprobs.detach()) * advantages).mean()
    return loss, {"entropy": entropy.mean().detach()}


def kernels(device: Device, f: Callable[[], object], *, most: int = 12) -> Figures:
    """GPU milliseconds of one call by kernel and by kind, and its launches; empty on the stand-in."""
    if device.small:
        f()
        return {}
    from torch.profiler import ProfilerActivity, profile

    device.sync()
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        f()
        device.sync()
    wall_ms = (time.perf_counter() - begin) * 1e3
    found = [(e.key, e.self_device_time_total / 1e3, e.count) for e in profiled.key_averages()]
    by_kind: dict[str, float] = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, ms, _ in found:
        low = name.lower()
        kind = next((k for k, words in KINDS.items() if any(w in low for w in words)), "other")
        by_kind[kind] += ms
    slowest = sorted(found, key=lambda row: -row[1])[:most]
    return {
        "gpu_ms": round(sum(ms for _, ms, _ in found), 2),
        "profiled_wall_ms": round(wall_ms, 1),
        "launches": sum(count for _, _, count in found),
        "ms_by_kind": {kind: round(ms, 2) for kind, ms in by_kind.items()},
        "slowest": [(name[:60], round(ms, 2), count) for name, ms, count in slowest],
    }


@probe
def gpu_against_cpu(device: Device) -> Figures:
    """The same weights on both: log-probs, sampled tokens, loss and gradient norm of an update."""
    shape = shape_of_small()
    if not device.small:
        shape = {**shape_of_qwen("0.5b"), "num_hidden_layers": 4, "vocab_size": 32000}
    cpu = Device("cpu")
    base = causal_lm(shape, cpu, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    lengths = [60 + 11 * i for i in range(8)]
    rows = [torch.randint(3, shape["vocab_size"], (n,), generator=draw) for n in lengths]
    each = [(n,) for n in lengths]
    masks = torch.cat([torch.arange(n) < 20 for n in lengths])
    sample = SequenceSample.from_tensors(
        [str(i) for i in range(8)],
        {"packed_input_ids": each, "prompt_mask": each},
        {"packed_input_ids": torch.cat(rows), "prompt_mask": masks},
    )
    inner = torch.ones(sum(lengths), dtype=torch.bool)
    inner[torch.tensor(lengths).cumsum(0) - 1] = False

    def copy_on(where: Device, dtype: torch.dtype) -> Any:
        other = causal_lm(shape, where, dtype=dtype)
        other.load_state_dict({name: x.to(dtype) for name, x in base.state_dict().items()})
        return other

    def logprobs(module: Any, where: Device) -> torch.Tensor:
        tokens = sample.data["packed_input_ids"].to(where.kind)
        with torch.no_grad():
            predicted = predict_packed(module, tokens, [[n] for n in lengths])
            return predicted.logprobs(tokens.roll(-1)).float().cpu()[inner]

    def answers(module: Any, where: Device) -> Any:
        return generate(
            module,
            [row[:20].to(where.kind) for row in rows],
            GenerationHyperparameters(max_new_tokens=16 if device.small else 48),
            eos_token_ids=[1],
            pad_token_id=0,
            row_seeds=torch.arange(8),
        )

    def update(module: Any, where: Device, dtype: str) -> Mapping[str, float]:
        engine = fsdp_engine(module, where, dtype=dtype, lr=1e-5)
        stats = engine.train_batch(sample, loss_fn=policy_loss, loss_weight_fn=num_answer_tokens)
        return {name: float(f"{stats[name]:.6g}") for name in ("grad_norm", "entropy")}

    expected, expected_answers = logprobs(base, cpu), answers(base, cpu)
    found: Figures = {"cpu_update": update(copy_on(cpu, torch.float32), cpu, "float32")}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        module = copy_on(device, dtype)
        off = (logprobs(module, device) - expected).abs()
        found[f"{name}_logprob_max"] = float(f"{off.max():.3g}")
        found[f"{name}_logprob_mean"] = float(f"{off.mean():.3g}")
        made = answers(module, device)
        found[f"{name}_equal_tokens"] = [
            int((x.cpu()[: len(y)] == y[: len(x)]).long().cumprod(0).sum())
            for x, y in zip(made.tokens, expected_answers.tokens, strict=True)
        ]
        found[f"{name}_update"] = update(copy_on(device, dtype), device, name)
        del module
        device.free_cache()
    assert found["float32_logprob_max"] < 2e-3, found
    norm = found["cpu_update"]["grad_norm"]
    assert abs(found["float32_update"]["grad_norm"] - norm) < 0.01 * norm, found
    return found


@probe
def train_speed(device: Device) -> Figures:
    """A policy's update of some 15,000 tokens: ms, share of the peak, memory against the plan, kernels."""
    found: Figures = {}
    for size, recompute in (("0.5b", False), ("1.5b", False), ("1.5b", True)):
        shape = shape_of_small() if device.small else shape_of_qwen(size)
        key = f"{size}_recompute" if recompute else size
        try:
            found[key] = _update_figures(device, shape, recompute=recompute)
        except torch.OutOfMemoryError as error:
            found[key] = {"out of memory": str(error).splitlines()[0][:200]}
        device.free_cache()
        sys.stdout.write(f"train_speed {key}: {json.dumps(found[key])}\n")
    return found


def _update_figures(device: Device, shape: Shape, *, recompute: bool) -> Figures:
    module = causal_lm(shape, device)
    engine = fsdp_engine(module, device, dtype="bfloat16", lr=1e-6, recompute=recompute)
    sample = grouped_answers(device, shape["vocab_size"])
    groups = sample.meta.seqlens["packed_input_ids"]
    lengths = [n for group in groups for n in group]
    prompt = int(sample.data["prompt_mask"][: lengths[0]].sum())

    def update() -> None:
        engine.train_batch(
            sample,
            loss_fn=policy_loss,
            loss_weight_fn=num_answer_tokens,
            mb_spec=MicroBatchSpec(),
        )

    def forward() -> None:
        engine.forward(
            sample, post_hook=lambda p, mb: p.logprobs(mb.data["packed_input_ids"].roll(-1))
        )

    update()  # moments are there from now on
    with device.peak() as peak:
        update()
        device.sync()
        peak_gib = peak() / GiB
    seconds = min(device.seconds(update) for _ in range(3))
    computed = Pieces.of(
        sample.data["packed_input_ids"], groups, to_the_end=False
    ).positions.numel()
    planned = planned_step_bytes(
        shape, lengths, recompute=recompute, prompt=prompt, group=len(groups[0])
    )
    whole_s = device.seconds(engine.whole_module)
    engine.trained()
    return {
        "ms": round(seconds * 1e3, 1),
        "tokens": sum(lengths),
        "computed_tokens": computed,  # a group's prompt once
        "tokens_per_s": round(sum(lengths) / seconds),
        "mfu": round(6 * _products(shape) * computed / seconds / PEAK_FLOPS, 3),
        "peak_gib": round(peak_gib, 2),
        "planned_gib": round(planned / GiB, 2),
        "forward_ms": round(min(device.seconds(forward) for _ in range(3)) * 1e3, 1),
        "whole_copy_s": [round(whole_s, 3), round(device.seconds(engine.whole_module), 3)],
        **kernels(device, update),
    }


def _products(shape: Shape) -> int:
    """Numbers of the weights that every token is multiplied with, the head's included."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = shape["num_key_value_heads"] * hidden // heads
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * shape["intermediate_size"]
    return int(shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"])


@probe
def decode_speed(device: Device) -> Figures:
    """Steps of the embedded engine over groups of eight: ms, tokens and GB a second, busy GPU."""
    found: Figures = {}
    for size, all_rows in (("0.5b", (1, 64, 256, 1024)), ("1.5b", (1, 64, 256))):
        shape = shape_of_small() if device.small else shape_of_qwen(size)
        module = causal_lm(shape, device)
        weights = 2 * sum(p.numel() for p in module.parameters())
        keys = shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
        of_token = 4 * shape["num_hidden_layers"] * keys
        for rows in (1, 8) if device.small else all_rows:
            engine = ContinuousEngine(module, max_running=rows, keep_answers=False, prefix_bytes=0)
            for i in range(rows):
                draw = torch.Generator().manual_seed(i // 8)
                length = 20 if device.small else 600 - 3 * (i // 8 % 50)
                prompt = torch.randint(3, 1000, (length,), generator=draw).tolist()
                gconfig = GenerationHyperparameters(max_new_tokens=300)
                engine.submit(
                    GenerationRequest(rid=str(i), prompt=tuple(prompt), gconfig=gconfig, seed=i)
                )
            read_s = device.seconds(engine.step)
            engine.step()
            seconds = device.seconds(engine.step, times=3 if device.small else 30)
            moved = weights + engine.num_tokens * of_token
            figures: Figures = {
                "read_s": round(read_s, 3),
                "ms": round(seconds * 1e3, 2),
                "tokens_per_s": round(rows / seconds),
                "gb_s": round(moved / seconds / 1e9),
                **kernels(device, engine.step, most=6),
            }
            if not device.small:
                figures["gpu_busy"] = round(figures["gpu_ms"] / (seconds * 1e3), 2)
            found[f"{size}_{rows}"] = figures
            sys.stdout.write(f"decode_speed {size}_{rows}: {json.dumps(figures)}\n")
            del engine
            device.free_cache()
        del module
        device.free_cache()
    return found
