"""Chooses the sources of a mixture's records by how often answers to them are right (pure).

Sources come in proportion to weight × max(floor, 4p(1 − p)), where p is a source's recent success rate:
what is half right teaches most (*learnability*: Rutherford et al., arXiv:2408.15099; of language models:
Foster et al., arXiv:2502.12272). Each source has epochs of its own: a record comes again when all of its
source have come.

Records of step t are drawn by the answers of steps up to t − 1 − ``lag``, the schedule's staleness bound:
they are trained before any record of step t is given out. So the order depends on answers, not on how early
it is drawn, and a resumed run, which restores ``snapshot``, goes on in that of an uninterrupted one.

Used by the master's event loop only. It uses no clock, tensors or sockets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import fsum

import msgspec

from realsys.api.errors import CheckpointError, ConfigError, InternalError
from realsys.api.worker_configs import CurriculumControl
from realsys.data.sources.record_parts import index_of, place
from realsys.master.graph.data_schedule import Datapoint, shuffled

UNKNOWN = 0.5  # success rate of a source without answers: asked as often as any
_UNITS = 1_000_000  # shares are whole numbers, whose sums are exact


# ---- decisions -----------------------------------------------------------------------------------


def shares(
    success: Mapping[str, float], *, weights: Mapping[str, float], floor: float
) -> dict[str, int]:
    """Returns each source's share of the next records, in millionths, at least one.

    Args:
        success: source → its success rate.
        weights: source → its weight; 1 for those without.
    """
    raw = {
        name: weights.get(name, 1.0) * max(floor, 4 * rate * (1 - rate))
        for name, rate in success.items()
    }
    total = fsum(raw.values())
    return {name: max(1, round(_UNITS * value / total)) for name, value in raw.items()}


def next_source(
    credits: Mapping[str, int], shares: Mapping[str, int]
) -> tuple[str, dict[str, int]]:
    """Returns the source of the next record, and all sources' credits after it.

    A credit is what a source has been due less what it has got, in millionths of a record. The largest
    is next, of equals the first. So a source of n is never due n − 1 records, nor has it ever got one too
    many, however shares change.
    """
    raised = {name: credits[name] + share for name, share in shares.items()}
    name = max(raised, key=raised.__getitem__)
    return name, {**raised, name: raised[name] - sum(shares.values())}


# ---- state ---------------------------------------------------------------------------------------


class StepSuccess(msgspec.Struct, frozen=True):
    """Answers to a source in one step: its questions, and the sum of their success rates."""

    step: int
    total: float
    count: int


class CurriculumState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a ``Curriculum`` between two steps, for a checkpoint; tables by source.

    Attributes:
        sizes: numbers of records.
        drawn: records drawn since the run began.
        credits: as in ``next_source``.
        history: the newest steps with answers, ascending.
        pending: success rates of answers since the last step.
        step: the last trained step.
    """

    sizes: dict[str, int]
    drawn: dict[str, int]
    credits: dict[str, int]
    history: dict[str, tuple[StepSuccess, ...]]
    pending: dict[str, tuple[float, ...]]
    step: int


class Curriculum:
    """The order of a run over several sources, made as it goes.

    Args:
        sizes: source → number of its records, in the order of the data set (``MixedQuestions.items``).
        batch_size: records a step.
        lag: the schedule's bound on staleness, in steps.
        shuffle: a new order for each epoch of a source; False: that of its file.
    Raises:
        ConfigError: there are fewer than two sources.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        control: CurriculumControl,
        batch_size: int,
        lag: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        if len(sizes) < 2:
            raise ConfigError(
                f"a curriculum chooses among sources, and the data set has {len(sizes)}",
                where="ExperimentConfig.curriculum",
                fix="use a data set of several sources (mixture), or leave the curriculum out",
            )
        self.sizes, self.control, self.batch_size, self.lag = dict(sizes), control, batch_size, lag
        self._seed, self._shuffle = seed, shuffle
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}  # source → an epoch, and its order
        self._due: tuple[int, Mapping[str, int]] = 0, {}  # a step, and the shares of its records
        self._drawn = dict.fromkeys(sizes, 0)
        self._credits = dict.fromkeys(sizes, 0)
        # Of the last step the success rates are asked for once more, by ``metrics``.
        kept = control.steps + lag + 1
        self._history = {name: deque[StepSuccess](maxlen=kept) for name in sizes}
        self._pending: dict[str, list[float]] = {name: [] for name in sizes}
        self._step = 0

    # ---- records ------------------------------------------------------------------------------

    def indexed_ids(self, step: int) -> list[tuple[int, str]]:
        """Draws the records of a step, from 1; returns index and id of each."""
        points = [self.draw(step) for _ in range(self.batch_size)]
        return [(point.index, point.id) for point in points]

    def draw(self, step: int) -> Datapoint:
        """Returns the next record, which is for step ``step``; its epoch is that of its source.

        Raises:
            InternalError: the steps that decide about it are not trained yet.
        """
        if self._step < step - 1 - self.lag:
            raise InternalError(
                f"a record of step {step} is drawn after step {self._step}, with a lag of {self.lag}",
                where="Curriculum.draw",
            )
        if self._due[0] != step:
            control = self.control
            due = shares(self.success(step), weights=control.weights, floor=control.floor)
            self._due = step, due
        name, self._credits = next_source(self._credits, self._due[1])
        epoch, position = divmod(self._drawn[name], self.sizes[name])
        self._drawn[name] += 1
        number = self._order(name, epoch)[position]
        return Datapoint(epoch, index_of(self.sizes, name, number))

    def _order(self, name: str, epoch: int) -> Sequence[int]:
        known, order = self._orders.get(name, (-1, ()))
        if known != epoch:
            size = self.sizes[name]
            order = shuffled(size, f"{self._seed}/{name}/{epoch}") if self._shuffle else range(size)
            self._orders[name] = epoch, order
        return order

    def source_of(self, id: str) -> str:
        """Returns the source of a datapoint."""
        return place(self.sizes, Datapoint.of(id).index)[0]

    # ---- answers ------------------------------------------------------------------------------

    def answered(self, id: str, success: float) -> None:
        """Notes the share of correct answers to a datapoint, trained or filtered, for the step that ends
        next.
        """
        self._pending[self.source_of(id)].append(success)

    def trained(self, step: int) -> None:
        """Completes a step: the answers since the one before are its own."""
        for name, rates in self._pending.items():
            if rates:  # fsum: the order in which they came does not matter
                self._history[name].append(StepSuccess(step, fsum(rates), len(rates)))
            self._pending[name] = []
        self._step = step

    def success(self, step: int) -> dict[str, float]:
        """Returns the success rates that decide about records of a step: of each source's newest steps with
        answers.
        """
        found = {}
        for name, history in self._history.items():
            known = [s for s in history if s.step < step - self.lag][-self.control.steps :]
            count = sum(s.count for s in known)
            found[name] = fsum(s.total for s in known) / count if count else UNKNOWN
        return found

    def metrics(self, step: int, ids: Sequence[str]) -> dict[str, float]:
        """Returns which share of a step's datapoints each source has, and the success rates behind it."""
        counts = Counter(map(self.source_of, ids))
        row = {f"curriculum/share/{name}": counts[name] / len(ids) for name in self.sizes}
        success = self.success(step)
        return row | {f"curriculum/success/{name}": rate for name, rate in success.items()}

    # ---- for a checkpoint ---------------------------------------------------------------------

    def snapshot(self) -> CurriculumState:
        """Returns the state between two steps."""
        return CurriculumState(
            sizes=dict(self.sizes),
            drawn=dict(self._drawn),
            credits=dict(self._credits),
            history={name: tuple(history) for name, history in self._history.items()},
            pending={name: tuple(rates) for name, rates in self._pending.items()},
            step=self._step,
        )

    def restore(self, state: CurriculumState) -> None:
        """Restores a ``snapshot``.

        Raises:
            CheckpointError: the sources had other sizes, so that its records would be others.
        """
        if state.sizes != self.sizes:
            raise CheckpointError(
                f"the run began with {state.sizes} records, there are {self.sizes} now",
                where="sources of the data set",
                fix="resume with the same data, or start a new trial",
            )
        self._drawn, self._credits, self._step = dict(state.drawn), dict(state.credits), state.step
        for name in self.sizes:
            self._history[name].clear()
            self._history[name].extend(state.history[name])
            self._pending[name] = list(state.pending[name])
