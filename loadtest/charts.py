"""Line charts as inline SVG: no script, no network, colours from the page's style so that dark works too."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, WIDTH - 16, 40, HEIGHT - 52
COLOURS = 8  # that the page's style defines


@dataclass(frozen=True, slots=True)
class Line:
    """Points in order; `errors` are ends of error bars, `notes` what hovering adds."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[tuple[float, float] | None] = ()
    notes: Sequence[str] = ()
    dots: bool = True
    dashed: bool = False
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """What it says, and how it is laid out; `end` fixes the largest value."""

    label: str
    log: bool = False
    end: float | None = None
    percent: bool = False


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    if high <= low:
        return [low]
    raw = (high - low) / max(count - 1, 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of two, or of ten where the range is wide; they enclose it."""
    if high / low <= 300:
        first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
        return [2.0**power for power in range(first, last + 1)]
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return [10.0**power for power in range(first, last + 1)]


class _Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: int, end: int) -> None:
        self.axis, self._begin, self._end = axis, begin, end
        if axis.log:
            self.ticks = log_ticks(min(values), max(values))
            low, high = self.ticks[0], self.ticks[-1]
            self._low, self._high = math.log(low), math.log(high if high > low else low * 2)
        else:
            high = axis.end if axis.end is not None else max(max(values, default=1.0), 0.0) * 1.05 or 1.0
            low = min(0.0, *values) if values else 0.0
            self.ticks = ticks(low, high)
            self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        place = math.log(value) if self.axis.log else value
        return self._begin + (place - self._low) / (self._high - self._low) * (self._end - self._begin)

    def text(self, value: float) -> str:
        if self.axis.percent:
            return f"{100 * value:g} %"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def chart(
    title: str, x: Axis, y: Axis, lines: Sequence[Line], limits: Sequence[tuple[str, float]] = ()
) -> str:
    """A figure. `limits` are dashed horizontal lines with a label; lines without points are left out."""
    lines = [line for line in lines if line.points]
    if not lines:
        told = f"{html.escape(title)}: nothing to show"
        return f'<figure class="empty"><figcaption>{told}</figcaption></figure>'
    levels = [value for line in lines for _, value in line.points]
    levels += [value for line in lines for bar in line.errors if bar for value in bar]
    across = _Scale(x, [place for line in lines for place, _ in line.points], _LEFT, _RIGHT)
    up = _Scale(y, [*levels, *(value for _, value in limits)], _BOTTOM, _TOP)
    parts = [_text(_LEFT, 20, title, "start", "title"), *_grid(across, up)]
    for label, value in limits:
        parts.append(_rule("limit", _LEFT, up(value), _RIGHT, up(value)))
        parts.append(_text(_RIGHT - 4, up(value) - 5, label, "end", "limit"))
    for line in lines:
        parts += _line(line, across, up)
    name = html.escape(title)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    return f"<figure>{svg}{_legend(lines) if len(lines) > 1 else ''}</figure>"


def _grid(across: _Scale, up: _Scale) -> list[str]:
    """Rules and figures along both axes, and what the axes are."""
    parts = []
    for value in up.ticks:
        parts.append(_rule("grid", _LEFT, up(value), _RIGHT, up(value)))
        parts.append(_text(_LEFT - 8, up(value) + 4, up.text(value), "end"))
    for value in across.ticks:
        parts.append(_rule("grid", across(value), _TOP, across(value), _BOTTOM))
        parts.append(_text(across(value), _BOTTOM + 18, across.text(value), "middle"))
    parts.append(_text((_LEFT + _RIGHT) / 2, HEIGHT - 10, across.axis.label, "middle"))
    turned = f'transform="translate(14 {(_TOP + _BOTTOM) / 2}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{html.escape(up.axis.label)}</text>')
    return parts


def _line(line: Line, across: _Scale, up: _Scale) -> list[str]:
    style = _style(line)
    places = [(across(x), up(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="{style}{" dashed" if line.dashed else ""}" points="{path}"/>']
    for (x, _), bar in zip(places, line.errors, strict=False):
        if bar is not None:
            top = bar[1] if up.axis.end is None else min(bar[1], up.axis.end)
            parts.append(_rule(f"bar {style}", x, up(bar[0]), x, up(top)))
    if not line.dots:
        return parts
    for number, ((px, py), (x, y)) in enumerate(zip(places, line.points, strict=True)):
        note = line.notes[number] if number < len(line.notes) else ""
        told = html.escape(f"{line.name}: {across.text(round(x, 3))}, {up.text(round(y, 3))} {note}".strip())
        dot = f'<circle class="{style}" cx="{px:.1f}" cy="{py:.1f}" r="3.5">'
        parts.append(f"{dot}<title>{told}</title></circle>")
    return parts


def _legend(lines: Sequence[Line]) -> str:
    keys = (f'<span class="key {_style(line)}">{html.escape(line.name)}</span>' for line in lines)
    return f"<figcaption>{''.join(keys)}</figcaption>"


def _style(line: Line) -> str:
    return f"c{line.colour % COLOURS}"


def _rule(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    kind = f'class="{style}" ' if style else ""
    return f'<text {kind}x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
