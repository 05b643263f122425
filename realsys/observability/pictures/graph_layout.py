"""Computes the layout of a dataflow graph's picture. Pure: a graph in, coordinates out.

Columns from left to right: the data set, then each topological level, and between two of them the keys
that the left one makes. Readers of the same keys share one label. A line that passes a column gets a
place in it (Sugiyama's dummy nodes), so that lines go around boxes and not through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from realsys.api.dataflow import DataflowGraph

BOX, KEYS, PASS = "box", "keys", "pass"
BOX_WIDTH, BOX_HEIGHT = 1.75, 0.86
DATASET = "\0data set"
MAX_KEYS = 4  # lines of a label; more become "+ n more"
_CHAR = 0.073  # inches of a character at 8 points
_LINE = 0.16
_GAP_X, _GAP_Y = 0.42, 0.3
_MARGIN = 0.3


@dataclass(frozen=True, kw_only=True)
class NodePosition:
    """A node of the picture; ``x`` and ``y`` are its centre, in inches from the top left."""

    name: str
    kind: str
    x: float
    y: float
    width: float
    height: float
    text: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EdgeLine:
    """A line from the right side of one node to the left side of another."""

    start: str
    end: str
    x0: float
    y0: float
    x1: float
    y1: float
    arrow: bool


@dataclass(frozen=True, kw_only=True)
class GraphLayout:
    """The whole picture, in inches."""

    places: dict[str, NodePosition]
    lines: tuple[EdgeLine, ...]
    width: float
    height: float


@dataclass
class _Net:
    """Nodes by column, before they have coordinates."""

    columns: list[list[str]]
    kinds: dict[str, str] = field(default_factory=dict)
    text: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)

    def add(self, column: int, name: str, kind: str, text: tuple[str, ...] = ()) -> None:
        if name not in self.kinds:
            self.columns[column].append(name)
            self.kinds[name] = kind
            self.text[name] = text

    def neighbours(self, name: str) -> list[str]:
        ahead = [b for a, b in self.lines if a == name]
        return ahead + [a for a, b in self.lines if b == name]

    def size(self, name: str) -> tuple[float, float]:
        if self.kinds[name] == BOX:
            return BOX_WIDTH, BOX_HEIGHT
        if self.kinds[name] == PASS:
            return 0.0, 0.1
        lines = self.text[name]
        return max(map(len, lines)) * _CHAR + 0.12, len(lines) * _LINE + 0.06


def lay_out(graph: DataflowGraph) -> GraphLayout:
    """Computes the positions of all nodes."""
    net = _net(graph)
    ys = _rows(net)
    top = min(ys[n] - net.size(n)[1] / 2 for n in net.kinds)
    places: dict[str, NodePosition] = {}
    left = _MARGIN
    for column in net.columns:
        wide = max((net.size(n)[0] for n in column), default=0.0)
        for name in column:
            width, height = net.size(name)
            if net.kinds[name] == PASS:
                width = wide  # the line runs straight through the column
            places[name] = NodePosition(
                name=name,
                kind=net.kinds[name],
                x=left + wide / 2,
                y=ys[name] - top + _MARGIN,
                width=width,
                height=height,
                text=net.text[name],
            )
        left += wide + _GAP_X + (0.25 if KEYS in {net.kinds[n] for n in column} else 0.0)
    height = max(p.y + p.height / 2 for p in places.values()) + _MARGIN + 0.35
    width = left - _GAP_X + _MARGIN
    return GraphLayout(places=places, lines=_lines(net, places), width=width, height=height)


def _lines(net: _Net, places: dict[str, NodePosition]) -> tuple[EdgeLine, ...]:
    """Returns the lines; lines into one box end side by side, in the order of their sources."""
    lines = []
    for end, place in places.items():
        sources = sorted((a for a, b in net.lines if b == end), key=lambda a: places[a].y)
        spread = min(0.17, place.height * 0.7 / max(1, len(sources) - 1))
        for i, start in enumerate(sources):
            shift = spread * (i - (len(sources) - 1) / 2) if place.kind == BOX else 0.0
            before = places[start]
            lines.append(
                EdgeLine(
                    start=start,
                    end=end,
                    x0=before.x + before.width / 2,
                    y0=before.y,
                    x1=place.x - place.width / 2,
                    y1=place.y + shift,
                    arrow=place.kind == BOX,
                )
            )
        if place.kind == PASS:
            x0, x1 = place.x - place.width / 2, place.x + place.width / 2
            lines.append(
                EdgeLine(start=end, end=end, x0=x0, y0=place.y, x1=x1, y1=place.y, arrow=False)
            )
    return tuple(lines)


def _net(graph: DataflowGraph) -> _Net:
    level_of = {name: i for i, level in enumerate(graph.levels, 1) for name in level}
    level_of[DATASET] = 0
    net = _Net([[] for _ in range(2 * len(graph.levels) + 1)])
    net.add(0, DATASET, BOX)
    for name, level in level_of.items():
        net.add(2 * level, name, BOX)
    for (producer, keys), readers in _bundles(graph).items():
        label = f"{producer}\0{','.join(keys)}"
        first = 2 * level_of[producer] + 1
        net.add(first, label, KEYS, shortened(keys))
        net.lines.append((producer, label))
        _connect(net, label, first, {r: 2 * level_of[r] for r in readers})
    return net


def _connect(net: _Net, label: str, first: int, readers: dict[str, int]) -> None:
    """Connects a label to its readers, through one shared place in each column in between."""
    last = max(readers.values())
    here = label
    for column in range(first + 1, last + 1):
        for reader, its_column in readers.items():
            if its_column == column:
                net.lines.append((here, reader))
        if column < last:
            passing = f"{label}\0{column}"
            net.add(column, passing, PASS)
            net.lines.append((here, passing))
            here = passing


def _bundles(graph: DataflowGraph) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Returns (producer, keys) → the readers of exactly these keys."""
    bundles: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for node in graph.nodes:
        by_source: dict[str, list[str]] = {}
        for key in node.input_keys:
            by_source.setdefault(graph.producers.get(key, DATASET), []).append(key)
        for source, keys in by_source.items():
            bundles.setdefault((source, tuple(keys)), []).append(node.name)
    return bundles


def shortened(keys: Sequence[str]) -> tuple[str, ...]:
    """Returns the lines of a label: at most MAX_KEYS, none longer than 26 characters."""
    shown = keys if len(keys) <= MAX_KEYS else keys[: MAX_KEYS - 1]
    lines = [k if len(k) <= 26 else f"{k[:25]}…" for k in shown]
    if len(shown) < len(keys):
        lines.append(f"+ {len(keys) - len(shown)} more")
    return tuple(lines)


def _rows(net: _Net) -> dict[str, float]:
    """Computes heights: orders each column by its neighbours' mean, then moves nodes towards it without
    overlap."""
    ys: dict[str, float] = {}
    for column in net.columns:
        _stack(net, column, ys, dict.fromkeys(column, 0.0))
    for _ in range(12):
        for columns in (net.columns, net.columns[::-1]):
            for column in columns:
                wanted = {n: _mean([ys[m] for m in net.neighbours(n)] or [ys[n]]) for n in column}
                # A tie keeps the order of the experiment file; lines that only pass go below boxes.
                column.sort(key=lambda n: round(wanted[n], 3))
                _stack(net, column, ys, wanted)
    return ys


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _stack(net: _Net, column: list[str], ys: dict[str, float], wanted: dict[str, float]) -> None:
    """Places a column, in its order, as near to the desired heights as possible (two sweeps, averaged)."""
    down, up = dict(wanted), dict(wanted)
    for above, below in pairwise(column):
        down[below] = max(down[below], down[above] + _distance(net, above, below))
    for below, above in pairwise(column[::-1]):
        up[above] = min(up[above], up[below] - _distance(net, above, below))
    for name in column:
        ys[name] = (down[name] + up[name]) / 2


def _distance(net: _Net, above: str, below: str) -> float:
    return (net.size(above)[1] + net.size(below)[1]) / 2 + _GAP_Y
