"""What rollout workers, the master and the manager say to each other: one tagged Struct each.

Rollout workers ask the master for prompts and tell it what came of them; they ask the manager which server
to use. The master tells the manager of new weights. Bulk goes to the model workers' tensor servers.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from realsys.api.data import SequenceMeta


class _RolloutMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all bodies: immutable, tagged by class name."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to answer.

    Attributes:
        id: of the datapoint, ``<epoch>-<index>``.
        index: of the record in the data set.
        tries: how often it was given out before; what an earlier holder delivers is refused.
        min_version: no token of it may come from older weights.
        target: index among the places that this worker may deliver to (``Places.holders``).
    """

    id: str
    index: int
    tries: int
    min_version: int
    target: int = 0


def sample_id(id: str, tries: int) -> str:
    """Id of what is delivered: another one at each try, so that a late delivery overwrites nothing."""
    return f"{id}.{tries}" if tries else id


# ---- rollout worker → master --------------------------------------------------------------------


class AskPlaces(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Who takes what I make? First request of a rollout worker; what it held before is given out anew.

    ``dataset_size`` records are in its data set: those whose ``index`` a ticket may bear.
    """

    worker: str
    dataset_size: int


class Places(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Tensor servers of the model workers that take trajectories, by index among the model workers."""

    holders: tuple[int, ...]
    endpoints: tuple[str, ...]  # of all model workers


class TakeWork(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Give me at most ``room`` prompts; wait up to ``wait_s`` for the first."""

    worker: str
    room: int
    wait_s: float = 5.0


class Work(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    tickets: tuple[Ticket, ...] = ()
    over: bool = False  # nothing more will come


class Deliver(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """A datapoint is whole and its tensors are at model worker ``holder``.

    ``oldest`` and ``newest`` are the versions of the weights that made its tokens.
    """

    worker: str
    id: str
    tries: int
    holder: int
    meta: SequenceMeta
    oldest: int
    newest: int
    stats: Mapping[str, float] = {}


class GiveUp(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """It will not be delivered by this worker.

    ``filtered``: it was answered but is not to be trained on (its group is all right or all wrong).
    ``unscored``: it was answered, and its reward is no number.
    """

    worker: str
    id: str
    tries: int
    why: str
    filtered: bool = False
    unscored: bool = False
    stats: Mapping[str, float] = {}


class Verdict(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """``kept``: it will be trained on. Else why not, and the worker forgets it."""

    kept: bool
    why: str = ""


# ---- rollout worker → manager -------------------------------------------------------------------


class AskServer(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Which server may go on with this request? Waits up to ``wait_s`` for one that may.

    Attributes:
        group: requests of one group share a prompt, and a server if they can.
        num_tokens: those that are there, and those that may come.
        min_version: only servers with weights at least that new.
        server: the one that had it before; -1: none.
    """

    worker: str
    rid: str
    group: str
    num_tokens: int
    min_version: int
    server: int = -1
    wait_s: float = 30.0


class UseServer(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """``url`` as in ``serving.api.ServerAddress``; empty: none in time, ``why`` says whom it waits for."""

    server: int = -1
    url: str = ""
    version: int = 0
    why: str = ""


class DoneWith(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """The request has left the server. ``broken``: because the server did not answer."""

    rid: str
    server: int
    num_new_tokens: int = 0
    broken: bool = False
    why: str = ""


# ---- master → manager ---------------------------------------------------------------------------


class NewWeights(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Bring the servers to this version. The reply comes when every healthy one has it."""

    source: bytes  # serving.api.WeightSource as msgpack: transport knows nothing of serving


class ServersAt(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Server index → version; quarantined ones are named with their reason."""

    versions: Mapping[int, int]
    sick: Mapping[int, str] = {}
    seconds: float = 0.0
    paused_s: float = 0.0  # longest pause of decoding
    num_bytes: int = 0


class AskManager(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """How do the servers do?"""


class ManagerView(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    versions: Mapping[int, int]
    sick: Mapping[int, str]
    running: Mapping[int, int]  # server → requests
    waiting: int  # requests that no server may take yet


class Accepted(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Nothing to tell."""


class Leave(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """The run is over: say goodbye and end."""


ToMaster = AskPlaces | TakeWork | Deliver | GiveUp
FromMaster = Places | Work | Verdict | Accepted
ToManager = AskServer | DoneWith | NewWeights | AskManager | Leave
FromManager = UseServer | ServersAt | ManagerView | Accepted
