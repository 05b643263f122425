"""Probes of what calculation finds wrong or slow: memory of sampling, a shared GPU, attention."""

from __future__ import annotations

from typing import Any

import torch
from device import Device, GiB
from models import causal_lm, grouped_answers, shape_of_qwen
from probed_shapes import kernels
from registry import Figures, probe

from realsys.backends.kernels.packed_attention import attend
from realsys.backends.kernels.packed_pieces import Pieces
from realsys.devices.cuda_settings import apply, settings_for
from realsys.generation.engine.cache_room import needs_of, room_on_gpu
from realsys.generation.engine.sampling import Picking, SlotSampler


@probe
def sampling_memory(device: Device) -> Figures:
    """Peak of picking 512 rows' next tokens, against what the plan keeps for it."""
    rows, vocab = (8, 1000) if device.small else (512, 151936)
    shape = config_of("0.5b")
    found: Figures = {"planned_bytes": round(needs_of(shape, 2).row / shape.vocab_size, 1)}
    for name, picking in {
        "plain": Picking(1.0, False, 0, 1.0),
        "top_p": Picking(1.0, False, 0, 0.95),
        "top_k": Picking(1.0, False, 50, 1.0),
    }.items():
        sampler = SlotSampler(torch.device(device.kind))
        for i in range(rows):
            sampler.add(i, picking, seed=i, position=0)
        logits = torch.randn(rows, vocab, device=device.kind, dtype=torch.bfloat16)
        sampler.pick(logits)
        with device.peak() as peak:
            ms = device.seconds(lambda s=sampler, x=logits: s.pick(x)) * 1e3
            found[f"{name}_bytes"] = round(2 + peak() / rows / vocab, 1)  # a row and entry
        found[f"{name}_ms"] = round(ms, 2)
    return found


def config_of(size: str) -> Any:
    """The configuration of a whole model, which is not made."""
    from transformers import Qwen2Config

    return Qwen2Config(**shape_of_qwen(size))


@probe
def room_of_a_share(device: Device) -> Figures:
    """Half a GPU: does the cache that is planned fit into what torch may take?"""
    if device.kind != "cuda":
        return {"said": "stood in for"}
    module = causal_lm({**shape_of_qwen("0.5b"), "num_hidden_layers": 2}, device)
    apply(settings_for("cuda", gpus=0.5))
    try:
        room = room_on_gpu(module, num_rows=64) * needs_of(module.config, 2).cached_token
        found: Figures = {
            "allowed_gib": round(0.475 * torch.cuda.mem_get_info()[1] / GiB, 1),
            "room_gib": round(room / GiB, 1),
        }
        torch.empty(int(room), dtype=torch.uint8, device="cuda")
        return found
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@probe
def attention_calls(device: Device) -> Figures:
    """A layer's attention of a micro-batch, forward and backward: rectangles, and one call for all."""
    heads, keys, dim = (4, 2, 16) if device.small else (14, 2, 64)
    sample = grouped_answers(device, 1000)
    groups = sample.meta.seqlens["packed_input_ids"]
    lengths = [n for group in groups for n in group]
    tokens = sample.data["packed_input_ids"].to(device.kind)
    pieces = Pieces.of(tokens, groups, to_the_end=False)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device.kind, dtype=torch.bfloat16, requires_grad=True)

    num = pieces.positions.numel()
    q, k, v = (drawn(1, n, num, dim) for n in (heads, keys, keys))

    def rectangles() -> None:
        attend(None, q, k, v, None, pieces=pieces)[0].float().sum().backward()

    found: Figures = {
        "computed_tokens": num,
        "rectangles": [(r.num, r.width) for r in pieces.rectangles],
        "rectangles_ms": device.milliseconds(rectangles),
        **kernels(device, rectangles, most=8),
    }
    if device.kind != "cuda":
        return found
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    longest = max(lengths)
    q, k, v = (drawn(len(tokens), n, dim) for n in (heads, keys, keys))

    def one_call() -> None:
        options = (ends, ends, longest, longest, 0.0, True)
        with torch.no_grad():
            made = torch.ops.aten._flash_attention_forward(q, k, v, *options, False)
            torch.ops.aten._flash_attention_backward(
                torch.ones_like(made[0]), q, k, v, made[0], made[1], *options, made[2], made[3]
            )

    try:
        found["one_call_ms"] = device.milliseconds(one_call)
    except Exception as error:  # no public function of torch
        found["one_call"] = f"{type(error).__name__}: {error}"[:200]
    return found
