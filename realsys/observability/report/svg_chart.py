"""Renders a line chart as inline SVG in the page's colours (light, dark, print)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from realsys.observability.report.curves import Curve, Points, smoothed, thinned

WIDTH, HEIGHT = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
_CHARACTER = 6  # of a tick's label, at most so wide
_SMOOTH_FROM = 40  # points; fewer are drawn as they are


def chart(curve: Curve, *, height: int = HEIGHT) -> str:
    """Renders a curve; many noisy points get a pale line and their smoothed mean."""
    finite = [
        (step, value)
        for points in curve.series.values()
        for step, value in points
        if math.isfinite(value)
    ]
    if not finite:
        return '<p class="empty">no finite value yet</p>'
    frame = _Frame.around(finite, height=height, percent=curve.percent)
    parts = [_grid(frame)]
    for number, points in enumerate(curve.series.values()):
        parts.append(_series(frame, points, number))
    label = escape(f"{curve.title}: {', '.join(curve.series)}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


class _Frame:
    """Maps data to pixels."""

    def __init__(
        self, x: tuple[float, float], y: Sequence[float], height: int, *, percent: bool
    ) -> None:
        self.x0, self.x1 = x
        self.y_ticks, self.y_texts = y, tick_texts(y, percent=percent)
        self.left = max(_LEFT, _CHARACTER * max(map(len, self.y_texts)) + 8)
        self.y0, self.y1 = y[0], y[-1]
        self.height = height

    @classmethod
    def around(cls, points: Sequence[tuple[int, float]], *, height: int, percent: bool) -> _Frame:
        steps = [p[0] for p in points]
        values = [p[1] for p in points]
        low, high = min(values), max(values)
        if percent and low >= 0 and high <= 1:
            low, high = (0.0, 1.0) if high > 0.25 else (0.0, high)
        x0, x1 = float(min(steps)), float(max(steps))
        return cls((x0, x1 if x1 > x0 else x0 + 1), ticks(low, high), height, percent=percent)

    def px(self, step: float) -> float:
        return self.left + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - self.left - _RIGHT)

    def py(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about ``count`` round numbers from at most ``low`` to at least ``high``, at least two."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    width = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    # A hair past a tick (a KL of -1e-9) is not worth another one.
    first, last = math.floor(low / width + 1e-3), math.ceil(high / width - 1e-3)
    return [i * width for i in range(first, last + 1)]


def number_text(value: float, *, percent: bool = False) -> str:
    """Formats a number briefly: 0.0123, 1.5e-06, 12,345, 87 %."""
    if not math.isfinite(value):
        return str(value)
    if percent:
        return f"{value * 100:.3g} %"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def tick_texts(values: Sequence[float], *, percent: bool = False) -> list[str]:
    """Formats an axis' labels with as many digits as distinguish neighbours, the same number for all."""
    scale, sign = (100.0, " %") if percent else (1.0, "")
    shown = [value * scale + 0.0 for value in values]
    step, largest = abs(shown[1] - shown[0]), max(map(abs, shown))
    digits = -math.floor(math.log10(step) + 1e-9)
    digits += round(step * 10**digits, 6) != round(step * 10**digits)  # 2.5
    if step >= 1e-4 and largest < 1e6:
        return [f"{value:,.{max(0, digits)}f}{sign}" for value in shown]
    of_mantissa = max(0, digits + math.floor(math.log10(largest)))
    found = [f"{value:.{of_mantissa}e}".partition("e") for value in shown]
    return [
        f"{mantissa}e{int(exponent)}{sign}" if float(mantissa) else f"0{sign}"
        for mantissa, _, exponent in found
    ]


def _grid(frame: _Frame) -> str:
    parts = []
    for value, text in zip(frame.y_ticks, frame.y_texts, strict=True):
        y = frame.py(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{frame.left - 5}" y="{y + 3:.1f}" text-anchor="end">{text}</text>'
        )
    inside = [t for t in ticks(frame.x0, frame.x1) if frame.x0 <= t <= frame.x1 and t == int(t)]
    for step in inside:
        parts.append(
            f'<text x="{frame.px(step):.1f}" y="{frame.height - 8}" '
            f'text-anchor="middle">{int(step)}</text>'
        )
    return "".join(parts)


def _series(frame: _Frame, points: Points, number: int) -> str:
    colour = f"s{number % 3}"
    finite = [p for p in points if math.isfinite(p[1])]
    if not finite:
        return ""
    if len(points) >= _SMOOTH_FROM:
        raw = _paths(frame, thinned(points), f"line pale {colour}")
        return raw + _paths(frame, thinned(smoothed(points)), f"line {colour}")
    dots = "".join(
        f'<circle class="dot {colour}" cx="{frame.px(s):.1f}" cy="{frame.py(v):.1f}" r="2.4">'
        f"<title>step {s}: {number_text(v)}</title></circle>"
        for s, v in finite
    )
    return _paths(frame, points, f"line {colour}") + dots


def _paths(frame: _Frame, points: Points, style: str) -> str:
    """Returns one polyline per run of finite values, so that a gap is shown as a gap."""
    runs: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            runs[-1].append(f"{frame.px(step):.1f},{frame.py(value):.1f}")
        elif runs[-1]:
            runs.append([])
    return "".join(f'<polyline class="{style}" points="{" ".join(r)}"/>' for r in runs if r)
