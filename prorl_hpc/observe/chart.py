"""Line charts as inline SVG text. Pure: numbers in, markup out; knows no run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 38
COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#8a3d93", "#a18112", "#b3324a")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve; points without a finite value are gaps."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line at an event."""

    x: float
    label: str


def line_chart(
    title: str, series: Sequence[Series], *, x_label: str = "step", marks: Sequence[Mark] = ()
) -> str:
    """An SVG element with axes, legend and marks; a sentence when there is nothing to draw."""
    finite = [(x, y) for one in series for x, y in one.points if y is not None and math.isfinite(y)]
    if not finite:
        return f'<p class="empty">{escape(title)}: no values yet.</p>'
    x_ticks = ticks(min(x for x, _ in finite), max(x for x, _ in finite))
    y_ticks = ticks(min(y for _, y in finite), max(y for _, y in finite))
    plot = _Scale(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        *_grid(plot, x_ticks, y_ticks, x_label),
        *(_mark(plot, mark) for mark in marks if plot.x_low <= mark.x <= plot.x_high),
    ]
    for number, one in enumerate(series):
        parts += _curve(plot, one, COLOURS[number % len(COLOURS)])
    if len(series) > 1:
        parts += _legend(series)
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, *, wanted: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _grid(
    plot: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str
) -> list[str]:
    parts = []
    for value in y_ticks:
        y = plot.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>'
        )
    for value in x_ticks:
        parts.append(
            f'<text class="tick" x="{plot.x(value)}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{value:g}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    return parts


def _mark(plot: _Scale, mark: Mark) -> str:
    x = plot.x(mark.x)
    return (
        f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
        f"<title>{escape(mark.label)}</title></line>"
    )


def _curve(plot: _Scale, series: Series, colour: str) -> list[str]:
    parts: list[str] = []
    stretch: list[str] = []
    for x, y in [*series.points, (0.0, None)]:
        if y is not None and math.isfinite(y):
            stretch.append(f"{plot.x(x)},{plot.y(y)}")
            continue
        if len(stretch) == 1:
            cx, cy = stretch[0].split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{colour}"/>')
        elif stretch:
            points = " ".join(stretch)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        stretch = []
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], LEFT + 8
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<rect x="{x}" y="{TOP}" width="10" height="10" fill="{colour}"/>'
            f'<text class="tick" x="{x + 14}" y="{TOP + 9}">{escape(one.name)}</text>'
        )
        x += 26 + 7 * len(one.name)
    return parts
