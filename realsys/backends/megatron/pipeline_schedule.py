"""Runs micro-batches through the stages of a pipeline, by Megatron's schedules.

Every process of a slot has the same data, so every stage knows the micro-batches; only the last stage
has their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from realsys.algorithms.predictions import Predictions
from realsys.backends.hf.local_engine import UseOutput
from realsys.data.ragged import pad_packed, unpad_to_packed
from realsys.data.sequence_sample import SequenceSample
from realsys.runtime.progress import tick

INPUT = "packed_input_ids"
# (output, index of the micro-batch) → loss


def run_microbatches(
    module: nn.Module,
    microbatches: Sequence[SequenceSample],
    use_output: UseOutput,
    *,
    predict: Callable[[Tensor], Predictions] | None = None,
    backward: bool,
    width_multiple: int = 1,
) -> None:
    """Runs micro-batches through all stages; the last passes each one's output to ``use_output``.

    Must be called with the groups active. Outputs are packed, as ``PipelinableEngine`` specifies.

    Args:
        predict: computes a policy's predictions from the last stage's states. None: the stage outputs a
            critic's values.
        backward: backpropagate the loss that ``use_output`` returns, and at the end sum gradients
            over the data axis.
        width_multiple: the rectangle's width is a multiple of it (for sequence parallelism).
    """

    def forward_step(indices: Any, module: nn.Module) -> tuple[Tensor, Any]:
        tick()
        i = next(indices)
        lengths = microbatches[i].piece_lengths(INPUT)
        output = module(*_rectangle(microbatches[i].data[INPUT], lengths, width_multiple))
        return output, partial(last_stage, i, lengths)

    def last_stage(
        i: int, lengths: list[int], output_BTV: Tensor, non_loss_data: bool = False
    ) -> Any:
        output = unpad_to_packed(output_BTV, lengths)
        loss = use_output(output.squeeze(-1) if predict is None else predict(output), i)
        # Number of tokens, never used as a divisor
        one = torch.ones((), dtype=torch.int32, device=output.device)
        return None if non_loss_data else (loss, one, {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(range(len(microbatches))),
        model=[module],
        num_microbatches=len(microbatches),
        seq_length=1,  # stages exchange the real one
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )


def _rectangle(
    tokens: Tensor, lengths: Sequence[int], width_multiple: int
) -> tuple[Tensor, Tensor, None]:
    """Returns tokens and positions ``[B, T]``, and no mask: attention is causal, padding is on the
    right.
    """
    input_ids_BT = pad_packed(tokens, lengths)
    if missing := -input_ids_BT.shape[1] % width_multiple:
        input_ids_BT = F.pad(input_ids_BT, (0, missing))
    positions_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
    return input_ids_BT, positions_T.expand_as(input_ids_BT), None
