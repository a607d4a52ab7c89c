"""The picture of a report: size against error, a panel a prefix length. PNG by matplotlib, or a plain SVG without."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from lmkv.codec.report.measure import Report
from lmkv.codec.report.table import BOUNDS, family, summary

COLORS = ("#d1603d", "#2f6f9f", "#6a9a78", "#b08a2e", "#7d5ba6", "#8d867b", "#3c8d93", "#a8476b", "#5a6b2f", "#444444")
FLOOR = 1e-5  # nats; smaller ones are drawn here


class Line(NamedTuple):
    """The levels of one codec: (bits a value, KL, its interval) by bits."""

    name: str
    points: list[tuple[float, float, float, float]]


def draw(report: Report, path: Path) -> Path:
    """Write the picture; where there is no matplotlib, as SVG beside. Returns what was written."""
    panels = panels_of(report)
    title = f"KV codecs on {report.model}: {len(report.texts)} texts, {report.continuation} tokens after each prefix"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        try:
            importlib.import_module("matplotlib").use("Agg")
            _png(panels, title, path)
            return path
        except ImportError:
            path = path.with_suffix(".svg")
    path.write_text(svg(panels, title), encoding="utf-8")
    return path


def panels_of(report: Report) -> list[tuple[int, list[Line]]]:
    """Prefix lengths, each with the lossy codecs measured at it."""
    panels: dict[int, dict[str, list[tuple[float, float, float, float]]]] = {}
    for row in summary(report):
        if row["kl"].value == 0:
            continue
        name = family(row["method"])
        panels.setdefault(row["prefix"], {}).setdefault(name, []).append((row["bits"].value, *row["kl"]))
    return [(prefix, [Line(name, sorted(lines[name])) for name in lines]) for prefix, lines in panels.items()]


def _png(panels: Sequence[tuple[int, list[Line]]], title: str, path: Path) -> None:
    plt: Any = importlib.import_module("matplotlib.pyplot")
    count = max(1, len(panels))
    size = (max(9.5, 1.2 + 5.6 * count), 5)
    with plt.rc_context({"font.size": 10} | {f"axes.spines.{side}": False for side in ("top", "right")}):
        figure, row = plt.subplots(1, count, figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axes, (prefix, lines) in zip(row[0], panels, strict=False):
            for number, (name, points) in enumerate(lines):
                bits, *kl = zip(*points, strict=True)
                middle, low, high = (np.maximum(FLOOR, side) for side in kl)
                style = {"color": COLORS[number % len(COLORS)], "marker": "o", "ms": 4.5, "lw": 1.4, "elinewidth": 0.8}
                axes.errorbar(bits, middle, yerr=[middle - low, high - middle], label=name, **style)
            for bound in BOUNDS:
                axes.axhline(bound, color="#bbbbbb", lw=0.7, zorder=0)
                axes.text(0, bound, f"{bound:g}", color="#888888", fontsize=8, va="bottom")
            axes.set(yscale="log", xlabel="bits a value, all bytes counted")
            axes.set_xlim(left=0)
            axes.set_title(f"{prefix}-token prefix", loc="left", fontsize=10.5, color="#333333")
        row[0][0].set_ylabel("KL to exact KV (nats)")
        row[0][-1].legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.012, ha="left")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def svg(panels: Sequence[tuple[int, list[Line]]], title: str) -> str:
    """The same as text, plainly."""
    wide, high, left, top = 460, 340, 60, 70
    points = [point for _, lines in panels for line in lines for point in line.points]
    most = max((point[0] for point in points), default=16.0) * 1.05
    bottom, ceiling = math.log10(FLOOR), math.log10(max([*(point[3] for point in points), 0.1]))

    def x(bits: float) -> float:
        return round(left + bits / most * wide, 1)

    def y(kl: float) -> float:
        return round(top + (ceiling - math.log10(max(kl, FLOOR))) / (ceiling - bottom) * high, 1)

    width, height = len(panels) * (wide + 180) + left, top + high + 60
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="12"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (prefix, lines) in enumerate(panels):
        powers, ticks = range(math.ceil(bottom), math.floor(ceiling) + 1), range(0, int(most) + 1, 2)
        out += [
            f'<g transform="translate({number * (wide + 180)} 0)">',
            f'<text x="{left}" y="{top - 14}">{prefix}-token prefix: KL to exact KV against bits a value</text>',
            f'<path d="M{left} {top}V{top + high}H{left + wide}" fill="none" stroke="#333"/>',
            *(f'<text x="{left - 8}" y="{y(10.0**n) + 4}" text-anchor="end">1e{n}</text>' for n in powers),
            *(f'<text x="{x(n)}" y="{top + high + 18}" text-anchor="middle">{n}</text>' for n in ticks),
            *(f'<path d="M{left} {y(bound)}H{left + wide}" stroke="#ccc"/>' for bound in BOUNDS),
        ]
        for place, (name, line) in enumerate(lines):
            color = COLORS[place % len(COLORS)]
            path = " ".join(f"{x(bits)},{y(kl)}" for bits, kl, _, _ in line)
            out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            out += [f'<path d="M{x(bits)} {y(low)}V{y(upper)}" stroke="{color}"/>' for bits, _, low, upper in line]
            out += [f'<circle cx="{x(bits)}" cy="{y(kl)}" r="3.5" fill="{color}"/>' for bits, kl, _, _ in line]
            out.append(f'<text x="{left + wide + 14}" y="{top + 16 * place + 10}" fill="{color}">{escape(name)}</text>')
        out.append("</g>")
    return "\n".join([*out, "</svg>", ""])
