"""The learning rate of a step: a pure function, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from realsys.api.options import OptimizerOptions


def learning_rate(options: OptimizerOptions, *, step: int, total_steps: int) -> float:
    """Computes the learning rate of the global step ``step``, counted from 0, for all its minibatches.

    Warm-up rises in equal parts and reaches the peak at its last step, so that no step is lost to
    a rate of 0. The shape then falls from the peak, at the first step after the warm-up, towards
    ``min_lr_ratio`` times the peak, which it reaches at ``total_steps`` and keeps from there on.

    Args:
        total_steps: length of the run; 0 or less means unknown: no decay.
    """
    warmup_steps = int(options.warmup_steps_proportion * max(total_steps, 0))
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    if total_steps <= 0 or options.lr_schedule == "constant":
        return options.lr
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if options.lr_schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * share)
