"""Messages between rollout workers, the master and the manager: one tagged Struct each.

Rollout workers request prompts from the master and report their outcome; they request a server from
the manager. The master announces new weights to the manager. Bulk data goes to the model workers'
tensor servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from realsys.api.data import SequenceMeta


class _RolloutMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all bodies: immutable, tagged by class name."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to answer.

    Attributes:
        id: of the datapoint, ``<epoch>-<index>``.
        index: of the record in the data set.
        tries: number of earlier grants; deliveries for an earlier grant are refused.
        min_version: no token may come from older weights.
        target: index among the model workers that this worker may deliver to (``Places.holders``).
        failures: grants after which it could not be played: the next answers have other seeds.
    """

    id: str
    index: int
    tries: int
    min_version: int
    target: int = 0
    failures: int = 0


FAILED_AGAIN = (
    3  # tries of an episode in a row, the third 5 s after the first: then it counts as failed
)


class TryFault(StrEnum):
    """What a try of an episode failed for."""

    FAILED = "failed"  # agent, environment or machine
    SERVERS = "servers"  # the policy did not answer
    AWAY = "away"  # something else that it needed did not, as far as the error tells
    DOUBTFUL = "doubtful"  # the policy's text may have caused it
    UNSCORED = "unscored"  # its reward is not a number


OUTAGES = (TryFault.SERVERS, TryFault.AWAY)


class EpisodeTry(msgspec.Struct, frozen=True, kw_only=True):
    """How one try of an episode ended.

    Attributes:
        id: of the datapoint.
        ago_s: before the report was sent it began; if it failed, the first of these failures was.
        failures: of this episode in a row, this one included; 0: it has a score.
        why: it failed.
    """

    id: str
    ago_s: float
    failures: int = 0
    fault: TryFault | None = None
    why: str = ""


def sample_id(id: str, tries: int) -> str:
    """Returns the id of a delivery, which differs for each grant so that a late delivery overwrites
    nothing."""
    return f"{id}.{tries}" if tries else id


# ---- rollout worker → master --------------------------------------------------------------------


class AskPlaces(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Requests the delivery targets. The first request of a rollout worker; prompts it held before
    are granted again.

    ``dataset_size``: number of records in the worker's data set, which bounds a ticket's ``index``.
    ``source_items``: of a mixture, its items by source. ``group_size``: episodes a prompt.
    """

    worker: str
    dataset_size: int
    source_items: Mapping[str, int] = {}
    group_size: int = 1


class Places(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Tensor servers of the model workers that accept trajectories, by model worker index."""

    holders: tuple[int, ...]
    endpoints: tuple[str, ...]  # of all model workers


class TakeWork(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Requests at most ``room`` prompts; waits up to ``wait_s`` for the first.

    ``episodes``: tries of episodes that ended since the worker's last report.
    """

    worker: str
    room: int
    wait_s: float = 5.0
    episodes: tuple[EpisodeTry, ...] = ()


class Work(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Granted prompts."""

    tickets: tuple[Ticket, ...] = ()
    over: bool = False  # no more prompts will follow
    nothing_succeeds: bool = False  # at any worker: failed tries don't count


class Deliver(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Reports that a datapoint is complete and its tensors are at model worker ``holder``.

    ``oldest`` and ``newest`` are the weight versions that generated its tokens.
    """

    worker: str
    id: str
    tries: int
    holder: int
    meta: SequenceMeta
    oldest: int
    newest: int
    stats: Mapping[str, float] = {}
    episodes: tuple[EpisodeTry, ...] = ()


class GiveUp(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Reports that this worker will not deliver a prompt.

    ``filtered``: it was answered but is excluded from training (its group is all right or all
    wrong). ``unscored``: it was answered, but its reward is not a number. ``undelivered``: it was
    answered, but could not be sent. None of these: an episode of it failed, however often it was played.
    """

    worker: str
    id: str
    tries: int
    why: str
    filtered: bool = False
    unscored: bool = False
    undelivered: bool = False
    stats: Mapping[str, float] = {}
    episodes: tuple[EpisodeTry, ...] = ()


class Verdict(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """``kept``: the delivery will be trained on. Otherwise ``why`` not, and the worker discards it.

    ``version``: number of steps that are trained so far.
    """

    kept: bool
    why: str = ""
    version: int = 0


class GaveUp(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Acknowledges that a prompt will not be delivered.

    ``closed``: it is not granted again. ``version``: number of steps that are trained so far.
    """

    closed: bool = False
    version: int = 0


# ---- rollout worker → manager -------------------------------------------------------------------


class AskServer(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Requests a server for a request to continue on; waits up to ``wait_s`` for one.

    Attributes: group: requests of one group share a prompt, and a server if possible. num_tokens:
    existing tokens plus those that may be generated. min_version: only servers with weights at
    least this new. server: the previous one; -1: none. continues: it continues an answer, and goes before
    requests that begin one.
    """

    worker: str
    rid: str
    group: str
    num_tokens: int
    min_version: int
    server: int = -1
    wait_s: float = 30.0
    continues: bool = False


class UseServer(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """The server to use. ``url`` as in ``generation_messages.ServerAddress``; empty: none in time,
    and ``why`` names what is waited for.

    ``in_line``: a healthy server will take the request when it has room, or has the weights that it gets.
    """

    server: int = -1
    url: str = ""
    version: int = 0
    why: str = ""
    in_line: bool = False


class DoneWith(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Reports that the request has left the server. ``broken``: because the server did not answer."""

    rid: str
    server: int
    num_new_tokens: int = 0
    broken: bool = False
    why: str = ""


# ---- master → manager ---------------------------------------------------------------------------


class NewWeights(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Updates the servers to this version. The reply is sent when every healthy server has it."""

    source: bytes  # WeightSource as msgpack


class ServersAt(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """The version of each server (index → version); quarantined ones with their reason."""

    versions: Mapping[int, int]
    sick: Mapping[int, str] = {}
    seconds: float = 0.0
    paused_s: float = 0.0  # longest pause of decoding
    num_bytes: int = 0


class AskManager(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Requests the state of the servers."""


class ManagerView(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """State of the servers."""

    versions: Mapping[int, int]
    sick: Mapping[int, str]
    running: Mapping[int, int]  # server → requests
    waiting: int  # requests that no server may take yet
    taking: Mapping[int, int] = {}  # server → version of the weights that it may be reading now


class Accepted(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Acknowledges a message."""


class Leave(_RolloutMessage, frozen=True, kw_only=True, tag=True):
    """Ends the manager: the run is over."""


ToMaster = AskPlaces | TakeWork | Deliver | GiveUp
FromMaster = Places | Work | Verdict | GaveUp
ToManager = AskServer | DoneWith | NewWeights | AskManager | Leave
FromManager = UseServer | ServersAt | ManagerView | Accepted
