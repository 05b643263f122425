"""What oracle.py and the runners of peers share: jobs, batches and outputs in files without pickle.

A peer's interpreter imports this, so it knows numpy and torch and nothing of realsys. A *form* is a
function of one batch (tensors by name) and of options, to a tensor or to tensors by name. A job asks a form
for its outputs on all batches of a set, and for the gradient of ``value`` with respect to one input.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Batch = dict[str, torch.Tensor]
Form = Callable[..., Any]
Arrays = dict[str, np.ndarray]


def evaluate(
    form: Form,
    arrays: Arrays,
    *,
    wrt: str | None,
    dtype: str = "float64",
    options: Mapping[str, Any] | None = None,
) -> Arrays:
    """What a form says of one batch, as float64; ``gradient`` among it if ``wrt`` names an input."""
    batch = {}
    for name, array in arrays.items():
        x = torch.from_numpy(array)
        batch[name] = x.to(getattr(torch, dtype)) if x.is_floating_point() else x
    if wrt is not None:
        batch[wrt].requires_grad_()
    torch.set_default_dtype(getattr(torch, dtype))  # of numbers that a form makes tensors of
    try:
        said = form(batch, **(options or {}))
    finally:
        torch.set_default_dtype(torch.float32)
    found = {"value": said} if isinstance(said, torch.Tensor) else dict(said)
    if wrt is not None:
        (gradient,) = torch.autograd.grad(found["value"].sum(), batch[wrt], allow_unused=True)
        found["gradient"] = torch.zeros_like(batch[wrt]) if gradient is None else gradient
    return {name: x.detach().double().numpy() for name, x in found.items()}


def write_batches(file: Path, batches: list[Arrays]) -> None:
    """One set of batches."""
    np.savez(
        file, **{f"{i}/{name}": x for i, batch in enumerate(batches) for name, x in batch.items()}
    )


def read_batches(file: Path) -> list[Arrays]:
    """The set that ``write_batches`` wrote; also outputs of one job."""
    batches: dict[int, Arrays] = {}
    with np.load(file, allow_pickle=False) as stored:
        for key in stored.files:
            number, name = key.split("/", 1)
            batches.setdefault(int(number), {})[name] = stored[key]
    return [batches[i] for i in range(len(batches))]


def run_jobs(forms: Mapping[str, Form], versions: Mapping[str, str]) -> None:
    """Main function of a runner: ``runner.py FOLDER PEER``.

    Reads ``jobs-PEER.json`` and the sets of batches in the folder; writes for job n ``PEER-n.npz``, and
    last ``said-PEER.json`` with versions, and the tracebacks of jobs that failed.
    """
    folder, peer = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    sets: dict[str, list[Arrays]] = {}
    failed: dict[str, str] = {}
    for number, job in enumerate(json.loads((folder / f"jobs-{peer}.json").read_text())):
        name = job["batches"]
        if name not in sets:
            sets[name] = read_batches(folder / f"batches-{name}.npz")
        try:
            found = [
                evaluate(
                    forms[job["form"]],
                    dict(x),
                    wrt=job["wrt"],
                    dtype=job["dtype"],
                    options=job["options"],
                )
                for x in sets[name]
            ]
        except (
            Exception
        ):  # whatever a peer's code raises is told to the driver, and the next job runs
            failed[str(number)] = traceback.format_exc()
        else:
            write_batches(folder / f"{peer}-{number}.npz", found)
    said = {"versions": dict(versions), "failed": failed}
    (folder / f"said-{peer}.json").write_text(json.dumps(said))
