"""Every error that realsys raises on purpose: what happened, where, what to do.

The class says who must act::

    RealsysError
     ├─ ConfigError          the user: a field, a file or a graph is wrong; nothing was started
     │   ├─ UnknownName      a name that is in no table; carries the nearest known ones
     │   ├─ ConfigErrors     several of them, reported at once
     │   └─ MadeByOtherCode  a trial's plan or settings, which only the revision that made them can read
          ├─ TrialError           the user: the trial's state does not allow this (live, finished, missing)
     │   ├─ NoSuchTrial
     │   └─ TrialIsLive
     ├─ ClusterError         the cluster or its administrator (Slurm, file system, ports)
     │   └─ SandboxFailure   a box for untrusted code failed; the code in it was not judged
     ├─ StoreError           the name-resolution store
     │   ├─ KeyExists / KeyNotFound
     │   ├─ StoreUnavailable
          │   │   └─ StoreDenied  it answers but denies access
          │   └─ LeaseLost        this process's lease expired: it must stop its side effects
          ├─ WaitTimeout          a deadline passed; names what was missing
     ├─ RemoteError          a request failed on another worker; carries that worker's traceback
     ├─ WorkerLost           a process died or was cut off
          ├─ OutOfMemory          the user: a GPU has too little memory for these settings
     ├─ StaleAttempt         the sender belongs to an attempt that was superseded (fencing)
     ├─ CheckpointError      a checkpoint is torn, unreadable or of another shape
     ├─ DataError            a data set or a sample is wrong
     │   ├─ RewardError      a reward rule gave no number for a record
     │   │   └─ RewardServiceAway  the service that it asks does not answer
     │   └─ GradientNotFinite  of several optimizer steps in a row, none of which was made
     ├─ RolloutError         experience can't be made: an agent, an environment or a prompt fails
     ├─ PolicyMismatch       sampling and training disagree about probabilities
          └─ InternalError        a bug in realsys: please report

All of them pickle (they cross process borders in tests and in submitit) and carry
``what``, ``where`` and ``fix`` as attributes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial


def encodable(text: str) -> str:
    r"""Returns a text that UTF-8 can write: halves of surrogate pairs, as names of files may have, become
    ``\ud800``."""
    return str(text).encode("utf-8", "backslashreplace").decode()


class RealsysError(Exception):
    """Base class of every error that realsys raises on purpose.

    Args:
        what: what happened, with both numbers if two values conflict.
        where: the file, field, worker or key.
        fix: what the reader should do next.
    """

    exit_code = 1  # of the CLI, see docs/cli.md
    from_worker = ""  # where it happened, if in another process
    resume_with = ""  # a setting, NAME=VALUE, that would have avoided the failure

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        what, where, fix = encodable(what), encodable(where), encodable(fix)
        super().__init__(f"{what}\n  where: {where}\n  fix:   {fix}")
        self.what, self.where, self.fix = what, where, fix

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(type(self), where=self.where, fix=self.fix)
        return make, (self.what,), self.__dict__  # instance attributes: notes, from_worker


class ConfigError(RealsysError):
    """The description of the experiment or of the cluster is wrong."""

    exit_code = 4


class UnknownName(ConfigError):
    """A name that is not registered."""


class MadeByOtherCode(ConfigError):
    """A trial's plan or settings can't be read by this code: another revision made them."""

    revision = ""  # as the plan records it


class ConfigErrors(ConfigError):
    """All problems found in one configuration, so that a user can fix them in one go."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        self.problems = tuple(problems)
        text = "\n".join(f"{i}. {p}" for i, p in enumerate(self.problems, 1))
        Exception.__init__(self, text)
        several = "s" * (len(self.problems) != 1)
        self.what = f"{len(self.problems)} problem{several} in the configuration"
        self.where = "; ".join(p.where for p in self.problems)
        self.fix = "; ".join(p.fix for p in self.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


class Problems(list[ConfigError]):
    """Mistakes found so far, for checks that report all of them together."""

    def add(self, what: str, *, where: str, fix: str) -> None:
        """Adds a mistake."""
        self.append(ConfigError(what, where=where, fix=fix))


def flat(error: ConfigError) -> tuple[ConfigError, ...]:
    """The single problems of ``error``."""
    return error.problems if isinstance(error, ConfigErrors) else (error,)


@contextmanager
def collected(problems: list[ConfigError]) -> Iterator[None]:
    """A ConfigError raised inside joins ``problems``; the rest of the block is skipped."""
    try:
        yield
    except ConfigError as error:
        problems.extend(flat(error))


def raise_all(problems: Iterable[ConfigError]) -> None:
    """Raises the problems, each once, if there are any."""
    unique: list[ConfigError] = []
    for problem in problems:
        if all((problem.what, problem.where) != (p.what, p.where) for p in unique):
            unique.append(problem)
    if unique:
        raise unique[0] if len(unique) == 1 else ConfigErrors(unique)


class TrialError(RealsysError):
    """The trial is not in a state that allows the request."""


class NoSuchTrial(TrialError):
    """There is no trial of that name under the file root."""

    exit_code = 3


class TrialIsLive(TrialError):
    """Another attempt of the trial is running."""


class ClusterError(RealsysError):
    """Slurm, the file system or a port failed or refused; the site's administrator must act."""

    exit_code = 5


class SandboxFailure(ClusterError):
    """A sandbox's box failed: nothing is known about the program in it, which may be run again."""


class StoreError(RealsysError):
    """The name-resolution store can't carry out the operation."""

    exit_code = 6


class KeyExists(StoreError):
    """An exclusive add found the key already present."""


class KeyNotFound(StoreError):
    """The key does not exist."""


class StoreUnavailable(StoreError):
    """The store does not answer. This implies nothing about the workers registered in it."""


class StoreDenied(StoreUnavailable):
    """The store answers but denies access.

    A run that had access before retries as if the store were unavailable: a password may be
    changing, or a role was revoked by mistake.
    """


class LeaseLost(StoreError):
    """The caller's lease could not be renewed in time; it must stop its side effects."""


class WaitTimeout(RealsysError):
    """A deadline passed. ``what`` names the awaited process or key and how long it was awaited."""

    exit_code = 7


class RemoteError(RealsysError):
    """A request failed on another worker; ``what`` holds that worker's own error text."""


class WorkerLost(RealsysError):
    """A worker process exited or was cut off while it was needed."""


class OutOfMemory(RealsysError):
    """A GPU ran out of memory during a computation."""


class StaleAttempt(RealsysError):
    """The message belongs to an attempt that has been superseded."""


class CheckpointError(RealsysError):
    """A checkpoint is torn, unreadable, or does not fit this model."""


class DataError(RealsysError):
    """A data set or a record in it can't be used."""

    exit_code = 4


class RewardError(DataError):
    """A reward rule or an environment returned no finite number for a record; names all three."""


class RewardServiceAway(RewardError):
    """The service that a reward rule asks does not answer; this tells nothing about the record."""


class GradientNotFinite(DataError):
    """The gradients of several optimizer steps in a row were not finite; weights are as before them."""


class PolicyMismatch(RealsysError):
    """Sampling and training token probabilities differ by more than the allowed limit."""


class RolloutError(RealsysError):
    """Rollouts can't be generated: an agent, an environment or a prompt keeps failing."""


class InternalError(RealsysError):
    """An invariant of realsys's own code is broken."""

    def __init__(self, what: str, *, where: str, fix: str = "report this as a bug") -> None:
        super().__init__(what, where=where, fix=fix)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the nearest known names, or all of them if none is near."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "use one of " + ", ".join(names) if names else "none is registered"
