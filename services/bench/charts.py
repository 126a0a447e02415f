"""Charts as SVG text: lines over linear or logarithmic axes, with titles that show on hover.

Colours are CSS variables of the page (look.css), so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec
from markupsafe import Markup

WIDTH = 560.0
HEIGHT = 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 18.0, 14.0, 46.0
_BOTTOM_UNNAMED = 26.0
_LOG_FROM = 40.0
"""A logarithmic axis where the greatest value is so many times the least one."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line: points (x, y) in ascending x, and a colour of the page."""

    name: str
    points: tuple[tuple[float, float], ...]
    color: str
    """A CSS colour: `var(--a)` or the like."""
    titles: tuple[str, ...] = ()
    """What shows on hover, one for each point; empty: none."""
    dashed: bool = False
    dots: bool = True
    line: bool = True
    area: bool = False


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis: label with unit, range, and where its ticks are."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False
    show: Callable[[float], str] = lambda value: f"{value:g}"

    def at(self, value: float) -> float:
        """Where a value lies between low (0) and high (1)."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return (value - low) / (high - low) if high > low else 0.5


def value_axis(label: str, values: Sequence[float], *, log_from: float = _LOG_FROM, whole: bool = False) -> Axis:
    """An axis for measures: from 0, or logarithmic where they lie `log_from` times apart. `whole`: no fractions."""
    top = max(values, default=0.0)
    if top <= 0:
        return Axis(label=label, low=0.0, high=1.0, ticks=(0.0, 1.0))
    least = min((v for v in values if v > 0), default=top)
    if top / least > log_from:
        ticks = log_ticks(least, top)
        return Axis(
            label=f"{label}, logarithmic", low=ticks[0], high=ticks[-1], ticks=_thinned(ticks), log=True, show=short
        )
    ticks = linear_ticks(top, whole=whole)
    return Axis(label=label, low=0.0, high=ticks[-1], ticks=ticks, show=short)


def load_axis(label: str, loads: Sequence[float]) -> Axis:
    """An axis whose ticks are the loads that were measured."""
    low, high = min(loads), max(loads)
    log = low > 0 and high / low >= 6
    if log:
        margin = (high / low) ** 0.04
        return Axis(
            label=label, low=low / margin, high=high * margin, ticks=_spaced(loads, low, high, log=True), log=True
        )
    margin = (high - low) * 0.04 or 1.0
    return Axis(label=label, low=low - margin, high=high + margin, ticks=_spaced(loads, low, high, log=False))


def linear_ticks(top: float, about: int = 5, *, whole: bool = False) -> tuple[float, ...]:
    """From 0 to just above `top` in steps of 1, 2, 2.5 or 5 times a power of ten."""
    raw = top / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    if whole:
        step = math.ceil(step)
    return tuple(round(i * step, 10) for i in range(math.ceil(top / step - 1e-9) + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten, from at most `low` to at least `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [round(m * 10.0**e, 12) for e in range(first, last + 1) for m in (1, 2, 5)]
    start = max(i for i, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min(i for i, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return tuple(ticks[start : max(end, start + 1) + 1])


def _thinned(ticks: tuple[float, ...]) -> tuple[float, ...]:
    return ticks if len(ticks) <= 8 else tuple(t for t in ticks if math.isclose(math.log10(t) % 1, 0, abs_tol=1e-9))


def _spaced(loads: Sequence[float], low: float, high: float, *, log: bool) -> tuple[float, ...]:
    """The loads that are far enough apart for their labels; first and last stay."""
    kept: list[float] = []
    span = math.log(high / low) if log else high - low
    for load in sorted(set(loads)):
        gap = math.inf if not kept or span == 0 else (math.log(load / kept[-1]) if log else load - kept[-1]) / span
        if gap >= 0.06:
            kept.append(load)
        elif load == high:
            kept[-1] = load
    return tuple(kept)


def short(value: float) -> str:
    """A number for an axis: 120k for 120,000."""
    if abs(value) >= 100_000:
        return f"{value / 1000:g}k"
    return f"{value:,g}" if abs(value) >= 1000 else f"{value:g}"


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    width: float = WIDTH,
    height: float = HEIGHT,
    limit: tuple[float, str] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """A chart. `limit` draws a line across at a value of y, `marks` ticks at the foot: (x, title)."""
    bottom = _BOTTOM if x.label else _BOTTOM_UNNAMED
    plot_w, plot_h = width - _LEFT - _RIGHT, height - _TOP - bottom

    def px(value: float) -> float:
        return _LEFT + plot_w * x.at(value)

    def py(value: float) -> float:
        return _TOP + plot_h * (1 - y.at(value))

    parts = [f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">']
    for tick in y.ticks:
        at = py(tick)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{width - _RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8:g}" y="{at + 4:.1f}">{y.show(tick)}</text>')
    floor = _TOP + plot_h
    for tick in x.ticks:
        at = px(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{floor:.1f}" y2="{floor + 4:.1f}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{floor + 17:.1f}">{escape(x.show(tick))}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT:g}" x2="{width - _RIGHT:g}" y1="{floor:.1f}" y2="{floor:.1f}"/>')
    middle = _LEFT + plot_w / 2
    if x.label:
        at = height - 8
        parts.append(f'<text class="label" text-anchor="middle" x="{middle:g}" y="{at:g}">{escape(x.label)}</text>')
    turned = f"rotate(-90 14 {_TOP + plot_h / 2:.1f})"
    parts.append(
        f'<text class="label" text-anchor="middle" transform="{turned}" x="14" y="{_TOP + plot_h / 2:.1f}">'
        f"{escape(y.label)}</text>"
    )
    for one in series:
        parts += _drawn(one, px, py, floor)
    if limit is not None and y.low <= limit[0] <= y.high:
        at = py(limit[0])
        line = f'<line x1="{_LEFT:g}" x2="{width - _RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
        parts.append(f'<g class="limit">{line}<title>{escape(limit[1])}</title></g>')
    for at_x, text in marks:
        at = px(at_x)
        parts.append(
            f'<g class="mark"><line x1="{at:.1f}" x2="{at:.1f}" y1="{floor - 9:.1f}" y2="{floor:.1f}"/>'
            f"<title>{escape(text)}</title></g>"
        )
    parts.append("</svg>")
    return Markup("".join(parts))


def _drawn(one: Series, px: Callable[[float], float], py: Callable[[float], float], floor: float) -> list[str]:
    if not one.points:
        return []
    places = [(px(x), py(y)) for x, y in one.points]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [f'<g class="series" style="--c:{one.color}">']
    if one.area:
        parts.append(
            f'<path class="area" d="{path} L{places[-1][0]:.1f} {floor:.1f} L{places[0][0]:.1f} {floor:.1f}Z"/>'
        )
    if one.line and len(places) > 1:
        dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<path class="line" d="{path}"{dashes}/>')
    for i, (x, y) in enumerate(places):
        title = f"<title>{escape(one.titles[i])}</title>" if one.titles else ""
        if one.dots:
            parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        if title:
            parts.append(f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="9">{title}</circle>')
    parts.append("</g>")
    return parts


def legend(series: Sequence[Series], limit: str = "") -> Markup:
    """The names of the lines, and of the limit that is drawn across; nothing for a single line."""
    if len(series) < 2 and not limit:
        return Markup()
    items = [
        f'<li style="--c:{one.color}"><i class="key{" dashed" if one.dashed else ""}"></i>{escape(one.name)}</li>'
        for one in series
    ]
    if limit:
        items.append(f'<li style="--c:var(--bad)"><i class="key dotted"></i>{escape(limit)}</li>')
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')
