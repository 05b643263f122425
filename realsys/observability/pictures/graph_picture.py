"""Draws the dataflow graph as a picture and as text.

graph_layout.py computes the positions; this file draws. Boxes are calls, coloured by role; keys are on
the arrows, once for all readers of the same keys.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realsys.api.dataflow import DataflowGraph, MFCDef, hooks_text
from realsys.observability.pictures.graph_layout import (
    BOX,
    BOX_HEIGHT,
    BOX_WIDTH,
    KEYS,
    EdgeLine,
    GraphLayout,
    NodePosition,
    lay_out,
)
from realsys.observability.pictures.palette import GRID, INK, MUTED, RoleColours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCH = 1.0  # a unit of the layout
_drawn: dict[str, bytes] = {}


def draw(graph: DataflowGraph, path: Path) -> None:
    """Writes the picture; the suffix of ``path`` selects the format (.png, .svg, .pdf)."""
    if path.suffix == ".png":
        path.write_bytes(graph_png(graph))
    else:
        graph_figure(graph).savefig(path, dpi=150)


def graph_png(graph: DataflowGraph) -> bytes:
    """Returns the picture as PNG bytes, drawn once per process."""
    key = repr(graph)
    if key not in _drawn:
        out = io.BytesIO()
        graph_figure(graph).savefig(out, format="png", dpi=150)
        _drawn[key] = out.getvalue()
    return _drawn[key]


def graph_figure(graph: DataflowGraph) -> Figure:
    """Draws the figure: data set on the left, one column per topological level."""
    from matplotlib.figure import Figure

    layout = lay_out(graph)
    figure = Figure(figsize=(layout.width * _INCH, layout.height * _INCH))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, layout.width)
    axes.set_ylim(layout.height, 0)
    axes.set_axis_off()
    colours = RoleColours()
    for line in layout.lines:
        _draw_line(axes, line)
    for place in layout.places.values():
        if place.kind == KEYS:
            _draw_keys(axes, place)
        elif place.kind == BOX:
            _draw_box(axes, graph, place, colours)
    _draw_legend(axes, graph, layout, colours)
    return figure


def _draw_line(axes: Any, line: EdgeLine) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    bend = (line.x1 - line.x0) / 2
    curve = Curve(
        [
            (line.x0, line.y0),
            (line.x0 + bend, line.y0),
            (line.x1 - bend, line.y1),
            (line.x1, line.y1),
        ],
        [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
    )
    axes.add_patch(
        FancyArrowPatch(
            path=curve,
            arrowstyle="-|>,head_length=5,head_width=3" if line.arrow else "-",
            color=MUTED,
            linewidth=1.3,
            shrinkA=0,
            shrinkB=0,
            zorder=1,
        )
    )


def _draw_keys(axes: Any, place: NodePosition) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (place.x - place.width / 2, place.y - place.height / 2)
    shape = "round,pad=0,rounding_size=0.06"
    label = FancyBboxPatch(corner, place.width, place.height, boxstyle=shape, zorder=2)
    label.set(facecolor="#f4f6f8", edgecolor=GRID, linewidth=0.8)
    axes.add_patch(label)
    axes.text(
        place.x,
        place.y,
        "\n".join(place.text),
        ha="center",
        va="center",
        fontsize=8,
        color=INK,
        linespacing=1.35,
        zorder=3,
    )


def _draw_box(axes: Any, graph: DataflowGraph, place: NodePosition, colours: RoleColours) -> None:
    from matplotlib.patches import FancyBboxPatch

    node = next((n for n in graph.nodes if n.name == place.name), None)
    colour = colours.of_role(node.role) if node else MUTED
    corner = (place.x - BOX_WIDTH / 2, place.y - BOX_HEIGHT / 2)
    shape = "round,pad=0,rounding_size=0.09"
    for face, alpha, edge, zorder in (("white", 1.0, "none", 2), (colour, 0.16, colour, 3)):
        box = FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, boxstyle=shape, zorder=zorder)
        box.set_facecolor((*_rgb(face), alpha))
        box.set_edgecolor(edge)
        box.set_linewidth(1.6)
        box.set_linestyle("-" if node else "--")
        axes.add_patch(box)
    title, *rest = _box_lines(node) if node else _dataset_lines(graph)
    axes.text(
        place.x, place.y - 0.17, title, ha="center", va="center", fontsize=10.5, weight="bold",
        color=INK, zorder=4,
    )  # fmt: skip
    axes.text(
        place.x, place.y + 0.15, "\n".join(rest), ha="center", va="center", fontsize=8, color=INK,
        linespacing=1.35, zorder=4,
    )  # fmt: skip


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(colour)
    return float(r), float(g), float(b)


def _box_lines(node: MFCDef) -> tuple[str, ...]:
    return node.name, f"{node.model_name} · {node.interface_type.value}", f"{node.n_seqs} seqs"


def _draw_legend(
    axes: Any, graph: DataflowGraph, layout: GraphLayout, colours: RoleColours
) -> None:
    x = 0.3
    for role in dict.fromkeys(n.role for n in graph.nodes):
        y = layout.height - 0.2
        axes.plot([x], [y], marker="s", markersize=7, color=colours.of_role(role), clip_on=False)
        axes.text(x + 0.13, y, role, va="center", fontsize=8.5, color=INK)
        x += 0.45 + 0.085 * len(role)


def _dataset_lines(graph: DataflowGraph) -> tuple[str, ...]:
    count = len(graph.dataset_keys)
    return "data set", f"{count} key{'s' if count != 1 else ''} a datapoint"


def graph_text(graph: DataflowGraph) -> str:
    """Returns the graph as text: a line per call, grouped by level, with the keys it reads and their
    sources."""
    lines = [f"data set → {', '.join(sorted(graph.dataset_keys))}"]
    wide = max(len(n.name) for n in graph.nodes)
    models = max(len(str(n.model_name)) for n in graph.nodes)
    kinds = max(len(n.interface_type.value) for n in graph.nodes)
    for number, level in enumerate(graph.levels, 1):
        together = "  (at the same time)" if len(level) > 1 else ""
        lines += ["", f"level {number}{together}"]
        for name in level:
            node = graph[name]
            lines.append(
                f"  {name:<{wide}}  {node.model_name!s:<{models}}  "
                f"{node.interface_type.value:<{kinds}}  {node.n_seqs} seqs"
            )
            for source, keys in _sources(graph, node):
                lines.append(f"  {'':<{wide}}    ← {source}: {', '.join(keys)}")
            if node.output_keys:
                lines.append(f"  {'':<{wide}}    → {', '.join(node.output_keys)}")
            if hooks := hooks_text(node):
                lines.append(f"  {'':<{wide}}    {hooks}")
    return "\n".join(lines)


def _sources(graph: DataflowGraph, node: MFCDef) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for key in node.input_keys:
        found.setdefault(graph.producers.get(key, "data set"), []).append(key)
    return list(found.items())
