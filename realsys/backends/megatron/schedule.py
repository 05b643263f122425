"""Micro-batches through the stages of a pipeline, and what the last stage found out to the others.

Every process of a slot has the same data, so every stage knows the micro-batches; only the last has
their outputs. What it makes of them (figures, rows) goes to the other stages as plain tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from realsys.api.progress import tick
from realsys.backends.megatron.company import Company
from realsys.data_plane.ragged import pad_packed, unpad_to_packed
from realsys.data_plane.sequence_sample import SequenceSample

INPUT = "packed_input_ids"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def run_microbatches(
    module: nn.Module,
    microbatches: Sequence[SequenceSample],
    use_output: Callable[[Tensor, int], Any],
    company: Company,
    *,
    backward: bool = False,
    width_multiple: int = 1,
) -> list[Any]:
    """What ``use_output`` (output, index of the micro-batch) returned, on the last stage; else [].

    Call with the company active. Outputs are as ``PipelinableEngine`` has them: packed, the whole
    vocabulary.

    Args:
        backward: ``use_output`` returns (loss, …); its gradient is taken, and gradients of all
            data-parallel ranks are added up at the end.
        width_multiple: of the rectangle's width (sequence parallelism cuts it evenly).
    """
    indices = iter(range(len(microbatches)))
    answers: list[Any] = []

    def at_the_end(i: int, output_BTV: Tensor, non_loss_data: bool = False) -> Any:
        output = unpad_to_packed(output_BTV, microbatches[i].piece_lengths(INPUT))
        if output.shape[-1] == 1:
            answer = use_output(output.squeeze(-1), i)
        else:
            answer = use_output(gather_from_tensor_model_parallel_region(output), i)
        answers.append(answer)
        return (
            (answer[0], torch.ones((), dtype=torch.int32, device=output.device), {})
            if backward
            else 0
        )

    def forward_step(iterator: Any, module: nn.Module) -> tuple[Tensor, Any]:
        tick()
        i = next(iterator)
        return module(*_rectangle(microbatches[i], width_multiple)), partial(at_the_end, i)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=indices,
        model=[module],
        num_microbatches=len(microbatches),
        seq_length=1,  # stages tell each other the real one
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
    return answers


def _rectangle(mb: SequenceSample, width_multiple: int) -> tuple[Tensor, Tensor, None]:
    """Tokens and positions ``[B, T]``, and no mask: attention is causal, padding is on the right."""
    input_ids_BT = pad_packed(mb.data[INPUT], mb.piece_lengths(INPUT))
    if missing := -input_ids_BT.shape[1] % width_multiple:
        input_ids_BT = F.pad(input_ids_BT, (0, missing))
    positions_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
    return input_ids_BT, positions_T.expand_as(input_ids_BT), None


def figures_from_last_stage(
    figures: Mapping[str, float] | None, company: Company
) -> dict[str, float]:
    """The last stage's ``figures`` on all stages, bit for bit."""
    if company.topology.pipeline == 1:
        return dict(figures or {})
    text = json.dumps(figures or {}).encode()
    device = _device(company)
    size = torch.tensor([len(text)], device=device)
    _broadcast(size, company)
    if not company.is_last_stage:
        text = bytes(int(size))
    carrier = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    _broadcast(carrier, company)
    return dict(json.loads(bytes(carrier.tolist())))


def tensor_from_last_stage(x: Tensor | None, company: Company, device: torch.device) -> Tensor:
    """The last stage's tensor (at most 6 dimensions) on all stages."""
    if company.topology.pipeline == 1 and x is not None:
        return x
    header = torch.zeros(8, dtype=torch.int64, device=device)
    if x is not None:
        shape = list(x.shape)
        header[: 2 + len(shape)] = torch.tensor([_DTYPES.index(x.dtype), len(shape), *shape])
    _broadcast(header, company)
    dtype, ndim, *shape = header.tolist()
    if x is None:
        x = torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=device)
    x = x.contiguous()
    _broadcast(x.view(torch.uint8), company)  # not every backend knows every dtype
    return x


def _broadcast(x: Tensor, company: Company) -> None:
    last = company.topology.pipeline - 1
    dist.broadcast(x, group=company.pipeline, group_src=last)


def _device(company: Company) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
