"""Keeps batches whose gradient was not finite, so that somebody can look at them.

A file a step and worker: ``torch.load`` gives a table with ``call``, ``step``, ``ids``, ``lengths`` (of
each id's sequences, by key), ``tensors`` (packed, by key) and ``metadata`` (a value an id, by name).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from realsys.api.errors import ClusterError
from realsys.data.sequence_sample import SequenceSample
from realsys.model_worker.recovery import save_state

logger = logging.getLogger(__name__)

MOST_KEPT = 10  # files of a worker in a phase


def keep_batch(
    folder: Path, sample: SequenceSample, *, call: str, step: int, worker: str
) -> Path | None:
    """Writes the batch that a worker's update got in a step; a resumed run writes over it.

    A disk that is full costs the file, not the run. Returns its path; None: it was not written.
    """
    ending = f"-{worker.replace('/', '-')}.pt"
    path = folder / f"{call}-step-{step:06d}{ending}"
    others = [file for file in folder.glob(f"*{ending}") if file != path]
    if len(others) >= MOST_KEPT:
        logger.warning("batch not kept, as there are %d already folder=%s", len(others), folder)
        return None
    state: dict[str, Any] = {
        "call": call,
        "step": step,
        "ids": list(sample.ids),
        "lengths": {key: [list(n) for n in of] for key, of in sample.meta.seqlens.items()},
        "tensors": {key: x.detach().to("cpu", copy=True) for key, x in sample.data.items()},
        "metadata": {name: list(values) for name, values in sample.meta.metadata.items()},
    }
    try:
        save_state(state, path)
    except (ClusterError, OSError) as error:
        logger.warning("batch not kept: %s", error)
        return None
    logger.warning("batch of the skipped step kept file=%s", path)
    return path
