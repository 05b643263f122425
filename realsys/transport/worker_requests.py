"""Every request that travels between workers, and its reply: one tagged Struct each.

The master asks, a model worker answers. A request with an ``order`` is *ordered*: a worker runs its
ordered requests strictly by that number (0, 1, 2, … for each worker and attempt), whatever the order
of arrival, so that processes which share collective operations enter them in the same order and can't
deadlock. Others are answered at once, also while a call computes. Bulk never travels here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from realsys.api.data import SequenceMeta


class _WorkerRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all bodies: immutable, tagged by class name."""


# ---- answered at once ---------------------------------------------------------------------------


class Ping(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Are you there?"""


class ClearData(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """These datapoints are used up: forget their tensors."""

    ids: tuple[str, ...]


class Exit(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Say goodbye and end."""


class Done(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Nothing to tell."""


# ---- ordered ------------------------------------------------------------------------------------


class Setup(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Load the data set and make every model's module. First request of an attempt."""

    order: int
    data_endpoints: tuple[str, ...]  # of model workers 0, 1, …
    rendezvous: str = ""  # of model worker 0's store; empty where workers meet by a file


class SetupDone(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    dataset_size: int  # 0 where the worker has no data set
    dataset_keys: tuple[str, ...]


class Initialize(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Let the backends make their engines for a run of this length."""

    order: int
    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    benchmark_steps: int | None


class Fetch(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Load these records of the data set as new datapoints."""

    order: int
    indices: tuple[int, ...]
    ids: tuple[str, ...]


class Fetched(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    meta: SequenceMeta


class RunCall(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Run model function call ``call`` on these datapoints.

    ``sources`` says for each other worker which tensors to get from it first: (worker index, key, ids).
    """

    order: int
    call: str
    step: int
    meta: SequenceMeta
    sources: tuple[tuple[int, str, tuple[str, ...]], ...] = ()


class CallDone(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """A call's outcome. Times are seconds since the epoch on the worker's clock."""

    meta: SequenceMeta | None = None  # of the new keys; from the head of a data-parallel slot only
    kept: bool = False  # new keys are here
    is_head: bool = True
    stats: Mapping[str, float] = {}
    started: float = 0.0
    ended: float = 0.0
    compute_s: float = 0.0  # inside the interface, without transfers
    tokens: int = 0


class Reallocate(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Move the weights of model ``source`` into model ``target`` (``role@replica``).

    Goes to every worker that holds a part of either. ``eta`` as in ``ParamReallocHook``.
    """

    order: int
    call: str  # whose hook it is, for logs and timeline
    step: int
    source: str
    target: str
    eta: float = 1.0


class Offload(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Move a model (``role@replica``) to CPU memory until its next call."""

    order: int
    call: str
    step: int
    model: str


class PublishWeights(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Keep a copy of the weights of model ``model`` as version ``version`` for generation servers to fetch.

    Goes to every worker that holds a part of it. The workers of each of ``groups`` give all of it together;
    none: all that hold a part do.
    """

    order: int
    call: str
    step: int
    model: str
    version: int
    groups: tuple[tuple[int, ...], ...] = ()


class Published(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """``names``: for each group, under which name the worker's tensor server gives its part; empty: it has
    none to give."""

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
    """Evaluate every model that has held-out data."""

    order: int
    step: int


class Evaluated(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    stats: Mapping[str, Mapping[str, float]]  # role → statistics
    samples: tuple[Mapping[str, Any], ...] = ()


class SaveModel(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Write a model (``role@replica``) as a Hugging Face directory."""

    order: int
    model: str
    folder: str


class SaveRecover(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Write this worker's state for a resume into ``folder``."""

    order: int
    folder: str


class RecoverSaved(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    file: str
    sha256: str
    num_bytes: int


class HashRecover(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Read ``file``, which is part of a checkpoint, and tell its hash."""

    order: int
    file: str


class RecoverHashed(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """``sha256`` of the file; empty where it can't be read, and ``why`` then."""

    sha256: str
    why: str = ""


class LoadRecover(_WorkerRequest, frozen=True, kw_only=True, tag=True):
    """Take back the state in ``file``; of the datapoints in it only ``keep``, or all."""

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
