"""A profile from what was seen of a model's KV: `Statistics` of some texts, and `fit`, which needs numpy alone.

To second order the KL divergence that a small error of KV causes is half its square in the metric of the model's Fisher
information. So each block of channels is weighted by the root of its diagonal, and decorrelated (Karhunen-Loeve): then
one uniform step is right for all coefficients, and the step is the only knob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from lmkv.chunk import bounds
from lmkv.codec import channels, coefficients, head
from lmkv.codec import profile as profiles
from lmkv.codec.floats import F32, narrow, widen
from lmkv.codec.klt import quantise, rows
from lmkv.codec.profile import Block, Description, Level, Place, Profile
from lmkv.codec.shape import Shape
from lmkv.codec.tables import MIDDLE
from lmkv.errors import BadInput

BITS = (3.2, 2.6, 2.1, 1.8, 1.5, 1.25, 1.0, 0.8, 0.6)  # a value, of the levels
LARGEST = 4095  # of a matrix: with it the sums of usual coefficients stay below 2^31, which decodes fast
WINDOW = 256  # tokens that share row ids: the rates are those of such chunks


@dataclass
class Statistics:
    """What was seen of one model's KV. kv: of each text, words [layers, channels, tokens] of ``dtype``, K un-rotated.

    fisher: sum over tokens of squared gradients [layers, channels]; fisher_tokens: how many.
    """

    geometry: Shape  # of one token of all layers; its rope is what K was un-rotated by
    sinks: int = channels.SINKS
    kv: list[np.ndarray[Any, Any]] = field(default_factory=list)
    fisher: np.ndarray[Any, Any] | float = 0.0
    fisher_tokens: int = 0

    def add(self, raw: memoryview, tokens: int) -> None:
        """The KV of a text's first ``tokens`` tokens, laid out as the geometry says."""
        shape = replace(self.geometry, page_tokens=tokens)
        x = channels.read(raw, shape, self.geometry.rope)
        if x is None:
            raise BadInput("a text whose KV is not finite")
        self.kv.append(narrow(x, self.geometry.dtype))

    def add_gradient(self, gradient: F32) -> None:
        """[layers, channels, tokens], of un-rotated channels; sinks left out."""
        self.fisher = self.fisher + (gradient.astype(np.float64) ** 2).sum(2)
        self.fisher_tokens += gradient.shape[2]

    def values(self, place: Place) -> Iterator[F32]:
        """A block's channels [C, tokens] of each text, without its sinks."""
        for words in self.kv:
            layers = slice(place.first_layer, place.first_layer + place.layers)
            shape = replace(self.geometry, first_layer=place.first_layer, layers=place.layers)
            x = widen(words[layers, :, self.sinks :], self.geometry.dtype)
            yield rows(x, place, shape)

    def weight(self, place: Place) -> np.ndarray[Any, Any]:
        """The root of each channel's Fisher information, fp64 [C]; 1 where nothing was measured."""
        if not self.fisher_tokens:
            return np.ones(place.layers * channels.per_layer(self.geometry), np.float64)
        layers = slice(place.first_layer, place.first_layer + place.layers)
        shape = replace(self.geometry, first_layer=place.first_layer, layers=place.layers)
        found = np.sqrt(rows(np.asarray(self.fisher)[layers, :, None] / self.fisher_tokens, place, shape)[:, 0])
        return np.asarray(np.maximum(found, 1e-3 * found.mean() + 1e-30), np.float64)


def places(geometry: Shape, chunk_tokens: int, layers: int = 3, heads: int = 0, joint: bool = True) -> list[Place]:
    """Blocks of so many layers and heads (0: all), K and V together or apart; none crosses a container's part.

    Where the layers of a part are not a multiple, some blocks are smaller.
    """
    heads = heads or geometry.heads
    layer_bytes = chunk_tokens * channels.per_layer(geometry) * geometry.width
    found = []
    for start, stop in pairwise(bounds(geometry.layers, layer_bytes)):
        for first in range(start, stop, layers):
            for head_ in range(0, geometry.heads, heads):
                for kv in ["kv"] if joint and geometry.dim_v else ["k", "v"] if geometry.dim_v else ["k"]:
                    size = min(layers, stop - first), head_, min(heads, geometry.heads - head_)
                    found.append(Place(first, *size, kv, 1))
    return found


def fit(
    statistics: Statistics,
    model: str,
    blocks: Sequence[Place],
    bits: Sequence[float] = BITS,
    measure: Callable[[Profile, int], float] | None = None,
    most_bytes: int | None = None,
) -> Profile:
    """The profile of these blocks, with a level for each of ``bits``, falling.

    measure: the KL divergence of a level of a profile. most_bytes: coefficients of least variance are left out until
    the file is no larger.
    """
    made = [_block(statistics, place) for place in blocks]
    budget = (1 - 0.02) * most_bytes - sum(12 * len(block.mean) for block, _ in made) if most_bytes else None
    steps = _steps(statistics, made, bits)
    floor = (min(steps) / 4) ** 2  # less never leaves the zero bin at any level
    if budget is not None:
        floor = max(floor, _floor([(len(b.mean), spread) for b, spread in made], budget, len(bits)))
    kept = [_keep(block, int(max(1, (spread > floor).sum()))) for block, spread in made]
    finished, rates = _defaults(statistics, kept, steps)
    g = statistics.geometry
    rope = head.stored(g.rope) if g.rope else None
    about = Description(
        model=model, dtype=g.dtype, layers=g.layers, heads=g.heads, dim=g.dim, dim_v=g.dim_v, sinks=statistics.sinks,
        levels=tuple(Level(step, round(rate, 4)) for step, rate in zip(steps, rates, strict=True)),
        blocks=tuple(block.place for block in finished),
        inv_freq=rope.inv_freq if rope else (), interleaved=bool(rope and rope.interleaved),
        factor=rope.factor if rope else 1.0,
    )  # fmt: skip
    profile = profiles.make(about, tuple(finished))
    if not measure:
        return profile
    kls = [measure(profile, level) for level in range(len(steps))]
    levels = tuple(Level(each.step, each.bits, kl) for each, kl in zip(about.levels, kls, strict=True))
    return with_levels(profile, levels)


def with_levels(profile: Profile, levels: tuple[Level, ...]) -> Profile:
    """The same profile with other notes on its levels; its id is another."""
    about = profile.description
    return profiles.make(msgspec.structs.replace(about, levels=levels), profile.blocks)


def _block(statistics: Statistics, place: Place) -> tuple[Block, np.ndarray[Any, Any]]:
    """A block with all of its coefficients, by falling variance, and those variances."""
    weight = statistics.weight(place)
    count, total, outer = 0, np.zeros(len(weight)), np.zeros((len(weight), len(weight)))
    about = next(statistics.values(place)).mean(1, keepdims=True)  # fp32 sums lose less without it
    for values in statistics.values(place):
        x = values - about
        count += x.shape[1]
        total += x.sum(1, dtype=np.float64)
        outer += x @ x.T
    mean = total / count
    covariance = (outer / count - np.outer(mean, mean)) * np.outer(weight, weight)
    mean += about[:, 0]
    spread, basis = np.linalg.eigh(covariance)
    spread, basis = np.maximum(spread[::-1], 0), basis[:, ::-1]
    inverse = basis / weight[:, None]
    scale = (np.abs(inverse).max(1) / LARGEST).astype(np.float32)
    matrix = np.rint(inverse / scale[:, None]).clip(-LARGEST, LARGEST).astype(np.int16)
    place = msgspec.structs.replace(place, kept=len(weight))
    empty = np.zeros((1, len(weight)), np.uint8)
    return Block(place, mean.astype(np.float32), weight.astype(np.float32), scale, matrix, empty), spread


def _keep(block: Block, count: int) -> Block:
    place = msgspec.structs.replace(block.place, kept=count)
    return replace(block, place=place, matrix=np.ascontiguousarray(block.matrix[:, :count]))


def _floor(blocks: list[tuple[int, np.ndarray[Any, Any]]], budget: float, levels: int) -> float:
    """The least variance such that matrices and defaults of what is above it take ``budget`` bytes."""
    variance = np.concatenate([spread for _, spread in blocks])
    cost = np.concatenate([np.full(len(spread), 2 * channels_ + levels) for channels_, spread in blocks])
    order = variance.argsort()[::-1]
    fits = np.cumsum(cost[order]) <= budget
    return 0.0 if fits.all() else float(variance[order][int(fits.sum())])


def _windows(statistics: Statistics, block: Block, every: int, first: int = 0) -> Iterator[F32]:
    """Every so many windows of the texts; all of a shorter text."""
    number = first
    for x in statistics.values(block.place):
        for at in range(0, max(1, x.shape[1] - WINDOW + 1), WINDOW):
            if number % every == 0:
                yield x[:, at : at + WINDOW]
            number += 1


def _steps(
    statistics: Statistics, made: list[tuple[Block, np.ndarray[Any, Any]]], bits: Sequence[float]
) -> list[float]:
    """The step that takes each number of bits a value, from the bytes that some windows take at several steps."""
    variance = np.concatenate([spread for _, spread in made])
    grid = np.sqrt(np.quantile(variance, 0.6)) * 2.0 ** np.linspace(-3.5, 2.5, 9)
    spent, values = np.zeros(len(grid)), 0
    for number, (block, _) in enumerate(made):
        for x in _windows(statistics, block, 16, number):
            values += x.size
            for i, step in enumerate(grid):
                spent[i] += 8 * len(coefficients.encode(_quantised(block, x, float(step))))
    return [float(np.float32(2 ** np.interp(-each, -spent / values, np.log2(grid)))) for each in bits]


def _quantised(block: Block, x: F32, step: float) -> coefficients.I16:
    q = quantise(block, x, step)
    if q is None:
        raise BadInput("coefficients too large for the step")
    return q


def _defaults(
    statistics: Statistics, blocks: list[Block], steps: Sequence[float], every: int = 4
) -> tuple[list[Block], list[float]]:
    """The blocks with the row ids that cost least over the texts at each level, and the bits a value."""
    finished = []
    spent, values = np.zeros(len(steps)), 0
    for number, block in enumerate(blocks):
        defaults = np.zeros((len(steps), block.place.kept), np.uint8)
        tested = list(_windows(statistics, block, 16, number))
        values += sum(x.size for x in tested)
        for level, step in enumerate(steps):
            seen = np.concatenate([_quantised(block, x, step) for x in _windows(statistics, block, every)], axis=1)
            defaults[level] = coefficients.choose(seen, np.full(len(seen), MIDDLE, np.uint8))
            spent[level] += sum(
                8 * len(coefficients.encode(_quantised(block, x, step), defaults[level])) for x in tested
            )
        finished.append(replace(block, defaults=defaults))
    return finished, (spent / max(1, values)).tolist()
