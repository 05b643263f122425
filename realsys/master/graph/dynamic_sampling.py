"""Chooses the questions that a synchronous step trains on, by the rewards of their answers (pure).

DAPO's dynamic sampling (arXiv:2503.14476, sec. 3.2): a step asks questions in rounds until ``batch_size``
of them have a mean reward in range::

    queue      + - + | - + + - + …       +: in range; batch of 3
               batch and filtered  given back: the first of the next step

A step consumes the queue up to its batch's last question. So what it trains on depends on the queue and the
weights alone, never on how many questions a round asks.

Used by the master's event loop only. It uses no clock, tensors or sockets; FunctionExecutor asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from statistics import fmean

import msgspec

from realsys.api.basics.success_range import SuccessPlace, place_of_success
from realsys.api.errors import InternalError, RolloutError
from realsys.api.worker_configs import DynamicSamplingControl
from realsys.master.graph.data_schedule import Datapoint

# The step, and the number of questions drawn since the run began → the next question.
Draw = Callable[[int, int], Datapoint]
# A round asks at least so much of a batch as 1 is of this: a tiny one takes as long.
SMALLEST_ROUND = 8


class BatchNotFilled(RolloutError):
    """A step's questions are spent, and too few of them have a mean reward in range."""


class SamplingState(msgspec.Struct, frozen=True, kw_only=True):
    """The queue between two steps, for a checkpoint.

    Attributes:
        drawn: questions drawn since the run began, in whatever way.
        returned: of those, questions that were given back, in order: the next step's first.
    """

    drawn: int
    returned: tuple[Datapoint, ...] = ()


class SampledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """How a step's batch was filled; all but ``rounds`` and ``reward`` are ids in the order of the queue.

    Attributes:
        trained: the batch.
        filtered_low, filtered_high, unscored: consumed without training.
        returned: given back to the queue.
        in_range: number of all asked questions in range.
        rounds: times that questions were asked.
        reward: mean of all asked questions' mean rewards; None if there is none.
    """

    trained: tuple[str, ...]
    filtered_low: tuple[str, ...]
    filtered_high: tuple[str, ...]
    unscored: tuple[str, ...]
    returned: tuple[str, ...]
    in_range: int
    rounds: int
    reward: float | None

    @property
    def filtered(self) -> tuple[str, ...]:
        """Ids of all that were consumed without training."""
        return (*self.filtered_low, *self.filtered_high, *self.unscored)

    def metrics(self) -> dict[str, float]:
        """Returns the step's counts under their metrics' names."""
        counts = {
            "asked": len(self.trained) + len(self.filtered) + len(self.returned),
            "kept": self.in_range,
            "filtered_low": len(self.filtered_low),
            "filtered_high": len(self.filtered_high),
            "returned": len(self.returned),
            "rounds": self.rounds,
        }
        found = {f"dynamic_sampling/{name}": float(count) for name, count in counts.items()}
        if self.unscored:
            found["dynamic_sampling/unscored"] = float(len(self.unscored))
        if self.reward is not None:
            found["dynamic_sampling/reward"] = self.reward
        return found


def round_size(*, batch_size: int, kept: int, asked: int, unit: int) -> int:
    """Returns how many questions are asked next: as many as probably fill the batch (pure).

    Args:
        kept, asked: questions of this step in range, and all.
        unit: the result is a multiple of it, if ``batch_size`` is one.
    """
    if not kept:  # nothing is known, or nothing is in range
        return batch_size
    likely = ceil((batch_size - kept) * asked / kept)
    wanted = max(likely, ceil(batch_size / SMALLEST_ROUND))
    return min(batch_size, ceil(wanted / unit) * unit)


class DynamicSampling:
    """The queue of a run's questions, and the choice of each step's batch.

    Args:
        draw: gives the queue's questions one after another.
        batch_size: questions that a step trains on.
        unit: each round asks a multiple of it; ``batch_size`` is one.
        drawn: questions drawn before, of a run that goes on.
    """

    def __init__(
        self,
        draw: Draw,
        *,
        control: DynamicSamplingControl,
        batch_size: int,
        unit: int = 1,
        drawn: int = 0,
    ) -> None:
        self._draw, self.control = draw, control
        self.batch_size, self._unit = batch_size, unit
        self._drawn, self._returned = drawn, list[Datapoint]()
        self.begin(0)

    # ---- a step -------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begins a step, from 1, with the questions at the front of the queue."""
        self._step, self._rounds = step, 0
        self._asked: list[Datapoint] = []
        self._places: dict[str, SuccessPlace] = {}
        self._rewards: list[float] = []
        self.batch: SampledBatch | None = None  # once it is full

    @property
    def kept(self) -> tuple[str, ...]:
        """Ids of the batch so far, in the order of the queue."""
        return tuple(self._in_range()[: self.batch_size])

    def ask(self, step: int) -> list[tuple[int, str]]:
        """Returns index and id of the questions of the next round of the step that was begun.

        Raises:
            BatchNotFilled: the step's questions are spent; all of them are back in the queue.
        """
        if step != self._step or self.batch is not None:
            raise InternalError(
                f"a round of step {step}, while step {self._step} was begun",
                where="DynamicSampling.ask",
            )
        asked, most = len(self._asked), self.control.max_gen_batches * self.batch_size
        if asked >= most:
            raise self._not_filled()
        size = round_size(
            batch_size=self.batch_size, kept=len(self._in_range()), asked=asked, unit=self._unit
        )
        points = [self._next() for _ in range(min(size, most - asked))]
        self._asked += points
        self._rounds += 1
        return [(point.index, point.id) for point in points]

    def _next(self) -> Datapoint:
        if self._returned:
            return self._returned.pop(0)
        point = self._draw(self._step, self._drawn)
        self._drawn += 1
        return point

    def answered(self, mean_rewards: Mapping[str, float | None]) -> tuple[str, ...]:
        """Notes a round's mean rewards, by id; returns those of the round that the step does not train on.

        With a full ``batch`` the questions behind its last are back in the queue.

        Raises:
            InternalError: they are not those of the round.
        """
        ids = [point.id for point in self._asked[len(self._places) :]]
        if sorted(ids) != sorted(mean_rewards):
            raise InternalError(
                f"asked {ids[:3]} …, answered {sorted(mean_rewards)[:3]} …",
                where="DynamicSampling.answered",
            )
        low, high = self.control.lowest, self.control.highest
        for name in ids:
            reward = mean_rewards[name]
            self._places[name] = place_of_success(reward, lowest=low, highest=high)
            if reward is not None and self._places[name] is not SuccessPlace.UNSCORED:
                self._rewards.append(reward)
        if len(self._in_range()) >= self.batch_size:
            self.batch = self._full()
        kept = set(self.kept)
        return tuple(name for name in ids if name not in kept)

    def _in_range(self) -> list[str]:
        return self._of(SuccessPlace.IN_RANGE, list(self._places))

    def _of(self, place: SuccessPlace, names: list[str]) -> list[str]:
        return [name for name in names if self._places[name] is place]

    def _full(self) -> SampledBatch:
        in_range = self._in_range()
        batch = in_range[: self.batch_size]
        names = [point.id for point in self._asked]
        end = names.index(batch[-1]) + 1
        consumed, rest = names[:end], self._asked[end:]
        self._returned[:0] = rest
        return SampledBatch(
            trained=tuple(batch),
            filtered_low=tuple(self._of(SuccessPlace.LOW, consumed)),
            filtered_high=tuple(self._of(SuccessPlace.HIGH, consumed)),
            unscored=tuple(self._of(SuccessPlace.UNSCORED, consumed)),
            returned=tuple(point.id for point in rest),
            in_range=len(in_range),
            rounds=self._rounds,
            reward=fmean(self._rewards) if self._rewards else None,
        )

    def _not_filled(self) -> BatchNotFilled:
        counts = {place: len(self._of(place, list(self._places))) for place in SuccessPlace}
        others = ", ".join(
            f"{counts[place]} {place.value}"
            for place in (SuccessPlace.LOW, SuccessPlace.HIGH, SuccessPlace.UNSCORED)
        )
        control, asked = self.control, len(self._asked)
        step, kept = self._step, counts[SuccessPlace.IN_RANGE]
        self._returned[:0] = self._asked
        return BatchNotFilled(
            f"step {step} asked {asked} questions, and {kept} of the {self.batch_size} that it trains on "
            f"have a mean reward in {control.lowest:g} to {control.highest:g} ({others})",
            where="schedule.success_range and schedule.max_gen_batches",
            fix="realsys resume TRIAL schedule.max_gen_batches="
            f"{2 * control.max_gen_batches} goes on after step {step - 1}; or start a new trial from its "
            "saved model with questions that it sometimes gets right, or with a wider success_range",
        )

    # ---- for a checkpoint ---------------------------------------------------------------------

    def snapshot(self) -> SamplingState:
        """Returns the state between two steps."""
        return SamplingState(drawn=self._drawn, returned=tuple(self._returned))

    def restore(self, state: SamplingState) -> None:
        """Restores a ``snapshot``."""
        self._drawn, self._returned = state.drawn, list(state.returned)
        self.begin(0)
