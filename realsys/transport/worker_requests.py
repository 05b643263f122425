"""Every request between master and model workers, and its reply: one tagged Struct each.

The master sends requests, a model worker replies. A request with an ``order`` is *ordered*: a
worker runs its ordered requests strictly by that number (0, 1, 2, … for each worker and attempt),
whatever the order of arrival, so that processes that share collective operations enter them in the
same order and can't deadlock. Others are answered immediately, also while a call computes. Bulk
data never travels here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from realsys.api.data import SequenceMeta
from realsys.api.model import FinetuneSpec


class _WorkerRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all bodies: immutable, tagged by class name."""


# ---- answered at once ---------------------------------------------------------------------------


class Ping(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Checks that the worker answers."""


class ClearData(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Frees the tensors of datapoints that are no longer needed."""

    ids: tuple[str, ...]


class Exit(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Makes the worker deregister and exit."""


class Done(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Acknowledges a request."""


# ---- ordered ------------------------------------------------------------------------------------


class Setup(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Loads the data set and creates every model's module. First request of an attempt."""

    order: int
    data_endpoints: tuple[str, ...]  # of model workers 0, 1, …
    rendezvous: str = ""  # of model worker 0's store; empty if workers use a file


class SetupDone(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Size and keys of the worker's data set; ``source_items``: of a mixture, its items by source."""

    dataset_size: int  # 0 if the worker has no data set
    dataset_keys: tuple[str, ...]
    source_items: Mapping[str, int] = {}


class Initialize(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Makes the backends create their engines for a run of this length."""

    order: int
    spec: FinetuneSpec


class Fetch(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Loads these records of the data set as new datapoints."""

    order: int
    indices: tuple[int, ...]
    ids: tuple[str, ...]


class Fetched(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Metadata of the new datapoints."""

    meta: SequenceMeta


class RunCall(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Runs model function call ``call`` on these datapoints.

    ``sources``: tensors to fetch from other workers first, as (worker index, key, ids).
    """

    order: int
    call: str
    step: int
    meta: SequenceMeta
    sources: tuple[tuple[int, str, tuple[str, ...]], ...] = ()


class CallDone(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """A call's outcome. Times are seconds since the epoch on the worker's clock."""

    meta: SequenceMeta | None = None  # of the new keys; only from the head of a data-parallel slot
    kept: bool = False  # this worker stores the new keys
    is_head: bool = True
    stats: Mapping[str, float] = {}
    started: float = 0.0
    ended: float = 0.0
    compute_s: float = 0.0  # inside the interface, without transfers
    tokens: int = 0


class Reallocate(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Copies the weights of model ``source`` into model ``target`` (``role@replica``).

    Sent to every worker that holds a part of either. ``eta`` as in ``ParamReallocHook``.
    """

    order: int
    call: str  # the call with the hook, for logs and timeline
    step: int
    source: str
    target: str
    eta: float = 1.0


class Offload(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Moves a model (``role@replica``) to CPU memory until its next call."""

    order: int
    call: str
    step: int
    model: str


class PublishWeights(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Keeps a copy of the weights of ``model`` as ``version`` for generation servers to fetch.

    Sent to every worker that holds a part of it. The workers of each of ``groups`` together serve
    all of it; empty: all workers that hold a part do.
    """

    order: int
    call: str
    step: int
    model: str
    version: int
    groups: tuple[tuple[int, ...], ...] = ()


class Published(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """``names``: for each group, the name of the worker's part at its tensor server; empty if it
    serves none."""

    names: tuple[str, ...]
    started: float
    ended: float
    num_bytes: int = 0


class Moved(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Weights were moved. Times are seconds since the epoch on the worker's clock."""

    started: float
    ended: float
    bytes_sent: int = 0
    bytes_received: int = 0


class Evaluate(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Evaluates every model that has held-out data."""

    order: int
    step: int


class Evaluated(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Statistics and samples of the evaluation."""

    stats: Mapping[str, Mapping[str, float]]  # role → statistics
    samples: tuple[Mapping[str, Any], ...] = ()


class SaveModel(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Writes a model (``role@replica``) as a Hugging Face directory."""

    order: int
    model: str
    folder: str


class SaveRecover(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Writes this worker's state for a resume into ``folder``."""

    order: int
    folder: str


class RecoverSaved(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """The state file that was written."""

    file: str
    sha256: str
    num_bytes: int


class HashRecover(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Reads ``file``, which is part of a checkpoint, and returns its hash."""

    order: int
    file: str


class RecoverHashed(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """``sha256`` of the file; empty if it can't be read, with the reason in ``why``."""

    sha256: str
    why: str = ""


class LoadRecover(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Restores the state in ``file``; of its datapoints only ``keep``, or all."""

    order: int
    file: str
    keep: tuple[str, ...] | None = None


Request = (
    Ping
    | ClearData
    | Exit
    | Setup
    | Initialize
    | Fetch
    | RunCall
    | Reallocate
    | Offload
    | PublishWeights
    | Evaluate
    | SaveModel
    | SaveRecover
    | HashRecover
    | LoadRecover
)
Reply = (
    Done
    | SetupDone
    | Fetched
    | CallDone
    | Moved
    | Published
    | Evaluated
    | RecoverSaved
    | RecoverHashed
)
