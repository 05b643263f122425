"""Describes a worker's memory for users: its largest terms, and the settings that reduce them (pure)."""

from __future__ import annotations

from realsys.api.errors import OutOfMemory
from realsys.planner.memory.memory_of_workers import WorkerMemory

GiB, MiB, KiB = 1 << 30, 1 << 20, 1 << 10
TOLD = 3  # terms, and what to do about each
ADVICE = {
    "activations": "lower max_tokens_per_mb, or recompute=true",
    "logits": "lower max_tokens_per_mb",
    "cache": "lower max_cache_tokens, or max_tokens_per_mb where that is not set",
    "reading prompts": "shorter prompts (task.max_prompt_len)",
    "weights": "cut the model over more GPUs, or offload=true on roles that can wait",
    "average": "leave ref_ema_eta out, or compute the reference in float32, which is its own average",
    "whole copy": "sample where nothing trains: on other model workers (allocation=actor_gen:d4@…), or on "
    "servers that cut the model over several GPUs (schedule=async schedule.server_backend=sglang "
    "scheduling.generation_server.gpu=4, with task.eval_size=0)",
    "gradients": "cut the model over more GPUs, or train adapters (lora.rank)",
    "whole gradients": "train adapters (lora.rank)",
    "optimizer": "cut the model over more GPUs, or cpu_offload=true (backend fsdp)",
}


def largest(memory: WorkerMemory, call: str) -> list[tuple[str, float]]:
    """Lists the terms of a worker's bytes while ``call`` runs, largest first."""
    parts = {
        f"{what} of {name}": n for name, terms in memory.copies.items() for what, n in terms.items()
    }
    parts |= {f"{what} in {call}": n for what, n in memory.calls.get(call, {}).items()}
    return sorted(parts.items(), key=lambda part: -part[1])


def advice(parts: list[tuple[str, float]]) -> str:
    """Lists settings that reduce these terms, in their order."""
    words = [name.partition(" of ")[0].partition(" in ")[0] for name, _ in parts]
    found = list(dict.fromkeys(ADVICE[word] for word in words if word in ADVICE))
    said = [text for text in found if not any(o != text and o.startswith(text) for o in found)]
    return "; ".join(said) or "cut the models over more GPUs"


def size(num_bytes: float) -> str:
    """Formats bytes as ``3.1 GiB``, ``12 MiB``, ``36 KiB``."""
    if num_bytes >= GiB / 10:
        return f"{num_bytes / GiB:.1f} GiB"
    if num_bytes < MiB / 10:
        return f"{num_bytes / KiB:.0f} KiB"
    return f"{num_bytes / MiB:.1f} MiB" if num_bytes < 10 * MiB else f"{num_bytes / MiB:.0f} MiB"


def out_of_memory(
    doing: str,
    *,
    where: str,
    peak: float,
    reserved: float,
    others: float,
    total: float,
    planned: WorkerMemory | None,
) -> OutOfMemory:
    """Makes the error for a worker whose GPU is full.

    Args:
        doing: the call, as the plan has it, or another request.
        peak, reserved: bytes that torch had in use at most, and that it holds of the GPU, of ``total``.
        others: bytes that torch does not count: other processes', and those of CUDA and NCCL.
        planned: the planner's prediction for the worker; None: not known.
    """
    what = (
        f"the GPU's memory ran out in {doing}: {size(peak)} were in use at most, torch holds "
        f"{size(reserved)} and others {size(others)} of {size(total)}"
    )
    if planned is None:
        return OutOfMemory(what, where=where, fix=ADVICE["activations"])
    parts = largest(planned, doing)
    sum_ = sum(n for _, n in parts)
    what += f"; planned are {size(sum_)}: " + "; ".join(
        f"{name} {size(n)}" for name, n in parts[:TOLD]
    )
    return OutOfMemory(what, where=where, fix=advice(parts[:TOLD]))
