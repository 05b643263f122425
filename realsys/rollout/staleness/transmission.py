"""Transmission graph of a detached run: the edges of experience and weights between makers and
trainers (pure).

*Makers* (rollout groups) sample with weights from *trainers*, and send experience to trainers. The
user names
both and their edges; this module detects edges that would make a run stall or idle. Trainers are
data-parallel: they step together, each on an equal share of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from realsys.api.errors import ConfigError, Problems, did_you_mean, raise_all

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Beyond this only the whole set and single trainers are checked, not every subset.
MAX_TRAINERS = 12


@dataclass(frozen=True, kw_only=True)
class TransmissionGraph:
    """A validated graph.

    Attributes:
        experience: maker → the trainers to which it sends, in the order given.
        weights: trainer → the makers to which it sends weights.
    """

    experience: Mapping[str, tuple[str, ...]]
    weights: Mapping[str, tuple[str, ...]]

    @property
    def makers(self) -> tuple[str, ...]:
        """Makers, in the order given."""
        return tuple(self.experience)

    @property
    def trainers(self) -> tuple[str, ...]:
        """Trainers, in the order given; trainer i is data-parallel rank i."""
        return tuple(self.weights)

    def sources(self, maker: str) -> tuple[str, ...]:
        """Trainers that send weights to ``maker``."""
        return tuple(t for t, makers in self.weights.items() if maker in makers)

    def senders(self, trainer: str) -> tuple[str, ...]:
        """Makers that send experience to ``trainer``."""
        return tuple(m for m, trainers in self.experience.items() if trainer in trainers)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Utilisation that the edges allow, if makers are equally fast.

    Attributes:
        used: share of the makers' total capacity that trainers can use, 0 … 1.
        short: trainers that delay the others. feeding: the makers that could feed them.
    """

    used: float
    short: tuple[str, ...]
    feeding: tuple[str, ...]


def parse_graph(
    makers: Mapping[str, str], trainers: Mapping[str, str], *, path: str = ""
) -> TransmissionGraph:
    """Parses ``{"maker_0": "trainer_0, trainer_1"}`` and ``{"trainer_0": "maker_0"}`` into a graph.

    Args:
        path: of the two settings, for errors.
    Raises:
        ConfigErrors: all problems: no makers or trainers, invalid or duplicate names, edges to unknown
            names, makers without receivers or without weights, trainers without experience.
    """
    problems = Problems()
    for kind, named in (("makers", makers), ("trainers", trainers)):
        if not named:
            problems.add(f"no {kind}", where=f"{path}{kind}", fix="name at least one")
        problems += _name_problems(named, f"{path}{kind}")
    for name in sorted(set(makers) & set(trainers)):
        problems.add(
            f"{name!r} is a maker and a trainer",
            where=f"{path}makers and {path}trainers",
            fix="give each a name of its own",
        )
    graph = TransmissionGraph(
        experience={
            maker: tuple(_targets(maker, text, trainers, "trainer", f"{path}makers", problems))
            for maker, text in makers.items()
        },
        weights={
            trainer: tuple(_targets(trainer, text, makers, "maker", f"{path}trainers", problems))
            for trainer, text in trainers.items()
        },
    )
    if not problems:
        problems += _dead_ends(graph, path)
    raise_all(problems)
    return graph


def _name_problems(named: Mapping[str, str], where: str) -> Iterator[ConfigError]:
    for name in named:
        if not _NAME.fullmatch(name):
            yield ConfigError(
                f"{name!r} is not a valid name",
                where=where,
                fix="begin with a letter, then letters, digits, '-' or '_'",
            )


def _targets(
    sender: str,
    text: str,
    known: Mapping[str, str],
    kind: str,
    where: str,
    problems: Problems,
) -> Iterator[str]:
    seen = set()
    for name in (part.strip() for part in text.split(",")):
        if not name:
            continue
        if name not in known:
            problems.add(
                f"{sender} sends to {name!r}, which is no {kind}",
                where=f"{where}.{sender}",
                fix=did_you_mean(name, list(known)),
            )
        elif name in seen:
            problems.add(
                f"{sender} sends to {name} twice", where=f"{where}.{sender}", fix="name it once"
            )
        else:
            seen.add(name)
            yield name


def _dead_ends(graph: TransmissionGraph, path: str) -> Iterator[ConfigError]:
    for maker in graph.makers:
        if not graph.experience[maker]:
            yield ConfigError(
                f"{maker} sends its experience to no trainer",
                where=f"{path}makers.{maker}",
                fix=f"name a trainer: {', '.join(graph.trainers)}",
            )
        if not graph.sources(maker):
            yield ConfigError(
                f"no trainer sends weights to {maker}: it would keep its initial weights for ever",
                where=f"{path}trainers",
                fix=f"add {maker} to a trainer, e.g. {graph.trainers[0]}",
            )
    for trainer in graph.trainers:
        if not graph.senders(trainer):
            yield ConfigError(
                f"no maker sends experience to {trainer}, and all trainers step together",
                where=f"{path}makers",
                fix=f"add {trainer} to a maker, or leave it out",
            )


def balance(graph: TransmissionGraph) -> Balance:
    """Computes how much of the makers' capacity the edges let through.

    Trainers take equal shares, so the worst-fed subset of trainers determines it (Hall's condition, as in a
    maximum flow): min over subsets S of (makers that send into S) / |S|.
    """
    worst, short = float("inf"), graph.trainers
    for subset in _subsets(graph.trainers):
        share = len(_feeding(graph, subset)) / len(subset)
        if share < worst:
            worst, short = share, subset
    used = min(1.0, worst * len(graph.trainers) / len(graph.makers))
    return Balance(used=used, short=short, feeding=_feeding(graph, short))


def _subsets(trainers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield tuple(trainers)
    sizes = range(1, len(trainers)) if len(trainers) <= MAX_TRAINERS else (1,)
    for size in sizes:
        yield from combinations(trainers, size)


def _feeding(graph: TransmissionGraph, trainers: Sequence[str]) -> tuple[str, ...]:
    return tuple(m for m in graph.makers if set(graph.experience[m]) & set(trainers))
