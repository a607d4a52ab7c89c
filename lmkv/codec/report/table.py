"""A report as rows, Markdown and JSON. Every figure that rests on texts comes with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lmkv.codec.report.measure import Answers, Report, Row
from lmkv.codec.report.methods import profile_bits
from lmkv.codec.report.metrics import Interval, Resampling, break_even, mean, median, perplexity_change

BOUNDS = (0.001, 0.01, 0.05)  # of the error classes, in nats
SIMULATED = ("1-ulp",)  # no method of anyone's


def summary(report: Report) -> list[dict[str, Any]]:
    """One mapping a method and prefix length, in numbers; intervals as [value, low, high].

    bits: of the encoded streams, a value; bits_profile: with the profile spread over 1 GB of KV; bits_container: with
    header pages and padding. Rates: GB/s of raw KV on one thread, medians over chunks; link: the bandwidth in Gbit/s
    below which sending encoded bytes and decoding them beats sending raw ones. Null: not known, as of what is only
    simulated.
    """
    return [_summary(row, Resampling(len(report.texts), report.continuation)) for row in report.rows]


def _summary(row: Row, draws: Resampling) -> dict[str, Any]:
    figures = {name: row.figures(name) for name in ("kl", "agree", "loss", "exact_loss")}
    bits = draws.interval(mean, np.array(row.bits))
    raw, timing = row.timing.raw_bytes, row.timing
    found: dict[str, Any] = {"method": row.method, "prefix": row.prefix, "bits": bits}
    found["bits_profile"] = bits.value + profile_bits(row.profile_bytes)
    found["bits_container"] = _known(float(np.mean(row.stored)))
    found["profile_bytes"] = row.profile_bytes
    found["kl"] = draws.interval(mean, figures["kl"])
    found["top1"] = draws.interval(mean, figures["agree"])
    found["perplexity_change"] = draws.interval(perplexity_change, figures["loss"], figures["exact_loss"])
    for name in ("encode", "decode", "copy"):
        found[f"{name}_gb_s"] = _known(raw / median(getattr(timing, name)) / 1e9)
    seconds = median(timing.decode)
    encoded = bits.value / 16 * raw
    found["link_gbit_s"] = _known(break_even(raw, encoded, seconds) * 8 / 1e9) if timing.decode else None
    return found


def retrieval(answers: Sequence[Answers]) -> list[dict[str, Any]]:
    """Accuracy of each method on the retrieval task, its difference to exact KV in points, and the answers' KL."""
    rows: list[dict[str, Any]] = []
    exact = np.array(answers[0].right) if answers else np.zeros((0, 0))
    for each in answers:
        right = np.array(each.right)
        draws = Resampling(*right.shape)
        rows.append(
            {"method": each.method, "prefix": each.prefix, "questions": right.size}
            | {"accuracy": draws.interval(mean, right)}
            | {"points": draws.interval(lambda x, y: 100 * (x - y), right, exact)}
            | {"kl": draws.interval(mean, np.array(each.kl))}
        )
    return rows


def classes(report: Report) -> list[dict[str, Any]]:
    """The fewest bits of each codec within each error class, at each prefix length; certain: so is the whole interval.

    ratio: of the bits to those of ``cachegen`` in the same class; None where it was not measured or does not reach it.
    """
    found: dict[tuple[int, float, str], dict[str, Any]] = {}
    for row in sorted(summary(report), key=lambda row: row["bits"].value):
        for bound in BOUNDS:
            name = family(row["method"])
            if row["kl"].value < bound and name not in SIMULATED:
                best = {"prefix": row["prefix"], "class": f"kl<{bound:g}", "codec": name, "method": row["method"]}
                best |= {"bits": row["bits"].value, "kl": row["kl"].value, "certain": row["kl"].high < bound}
                found.setdefault((row["prefix"], bound, name), best)
    for (prefix, bound, _), best in found.items():
        other = found.get((prefix, bound, "cachegen"))
        best["ratio"] = best["bits"] / other["bits"] if other else None
    return [found[key] for key in sorted(found)]


def family(method: str) -> str:
    """The codec of ``klt:3``, and what ``kivi-4`` and ``pca-0.5`` are of."""
    name = method.partition(":")[0]
    return name.rpartition("-")[0] if name.startswith(("kivi-", "pca-")) else name


def class_cells(report: Report) -> list[dict[str, str]]:
    """`classes` as text for a table."""
    return [
        {
            "prefix": str(row["prefix"]),
            "class": row["class"],
            "fewest bits": row["method"],
            "bits/value": f"{row['bits']:.2f}",
            "KL": _small(row["kl"]),
            "whole interval": "yes" if row["certain"] else "no",
            "bits to cachegen's": "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        }
        for row in classes(report)
    ]


def as_json(report: Report) -> dict[str, Any]:
    """All of it, for machines; also each text's own bits and KL."""
    each = [
        {"method": row.method, "prefix": row.prefix, "bits": row.bits, "kl": row.figures("kl").mean(1).tolist()}
        for row in report.rows
    ]
    return {
        "model": report.model, "dtype": report.dtype, "weight_bytes": report.weight_bytes, "texts": report.texts,
        "continuation": report.continuation, "rows": summary(report), "by_text": each,
        "classes": classes(report), "retrieval": retrieval(report.answers), "depths": report.depths,
    }  # fmt: skip


def cells(report: Report) -> list[dict[str, str]]:
    """The summary as text for a table, a row a method and prefix length."""
    columns: Mapping[str, tuple[str, Callable[[Any], str]]] = {
        "prefix": ("prefix", str),
        "method": ("codec", str),
        "bits": ("bits/value", lambda x: f"{x.value:.2f}"),
        "bits_profile": ("+profile/GB", lambda x: f"{x:.2f}"),
        "kl": ("KL", lambda x: _interval(x, _small)),
        "top1": ("top-1", lambda x: _interval(x, lambda y: f"{y:.3f}")),
        "perplexity_change": ("perplexity", lambda x: _interval(x, lambda y: f"{100 * y:+.1f}") + " %"),
        "encode_gb_s": ("encode GB/s", _rate),
        "decode_gb_s": ("decode GB/s", _rate),
        "link_gbit_s": ("pays below Gbit/s", _rate),
    }
    rows = sorted(summary(report), key=lambda row: (row["prefix"], -row["bits"].value))
    return [{title: show(row[name]) for name, (title, show) in columns.items()} for row in rows]


def retrieval_cells(report: Report) -> list[dict[str, str]]:
    """The retrieval task as text for a table."""
    return [
        {
            "prefix": str(row["prefix"]),
            "codec": row["method"],
            "questions": str(row["questions"]),
            "right": _interval(row["accuracy"], lambda x: f"{x:.3f}"),
            "points to exact": _interval(row["points"], lambda x: f"{x:+.1f}"),
            "KL of answers": _interval(row["kl"], _small),
        }
        for row in retrieval(report.answers)
    ]


def markdown(report: Report) -> str:
    """The tables as Markdown, and what they rest on."""
    parts = [f"{_title(report)}\n", _markdown(cells(report))]
    parts += ["\nThe fewest bits within an error class:\n", _markdown(class_cells(report))]
    if report.answers:
        parts += ["\nRetrieval, key to value:\n", _markdown(retrieval_cells(report))]
    parts.append(f"\nTexts: {', '.join(report.texts)}.")
    return "\n".join(parts) + "\n"


def _title(report: Report) -> str:
    profile = max((row.profile_bytes for row in report.rows), default=0)
    share = f" Profile: {profile / 1e6:.1f} MB, {profile / report.weight_bytes:.1%} of the weights at 16 bits."
    return (
        f"{report.model}, {report.dtype} arithmetic, KV in bfloat16 (16 bits/value), {len(report.texts)} texts, "
        f"{report.continuation} tokens after each prefix; brackets: 95 % bootstrap intervals over texts and positions."
        f"{share if profile else ''}"
    )


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _interval(x: Interval, show: Callable[[float], str]) -> str:
    return f"{show(x.value)} [{show(x.low)}, {show(x.high)}]"


def _small(x: float) -> str:
    """``0.0061``, ``6.1e-06``, ``0``."""
    return f"{x:.2g}" if x and abs(x) < 1e-4 else f"{x:.4f}" if x else "0"


def _rate(x: float | None) -> str:
    return f"{x:.3g}" if x else "-"


def _known(x: float) -> float | None:
    return x if math.isfinite(x) else None
