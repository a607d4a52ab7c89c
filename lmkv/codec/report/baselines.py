"""Methods of others, simulated: their values as they come back, and the bits that their parts would take.

Nothing is kept for the reader's sake that a real coder would have to send: scales and zero points count in full, code
lengths are those of tables a decoder knows. Where a paper leaves some tokens exact beside the coded ones (KIVI's
recent window), nothing is left exact here: stored chunks are all alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lmkv.codec.report.methods import Coded
from lmkv.codec.report.model import CHUNK_TOKENS, KV, bits, floats
from lmkv.codec.shape import Rope

F32 = NDArray[np.float32]
E4M3_MAX = np.float32(448)


@dataclass(frozen=True)
class Kivi:
    """KIVI (arXiv 2402.02750): ``width`` bits, K in groups of tokens for each channel, V in groups of channels for each
    token, an fp16 scale and zero point for each group."""

    width: int
    group: int = 32
    profile_bytes: int = 0

    @property
    def name(self) -> str:
        """``kivi-4``."""
        return f"kivi-{self.width}"

    def code(self, kv: KV) -> Coded:
        """Whole chunks."""
        k, v = floats(kv.k).swapaxes(2, 3), floats(kv.v)
        chunks = kv.k.shape[2] // CHUNK_TOKENS
        groups = sum(x[..., :: self.group].size for x in (k, v))
        total = self.width * (k.size + v.size) + 32 * groups
        return Coded(KV(bits(self._quantise(k).swapaxes(2, 3)), bits(self._quantise(v))), [total / chunks] * chunks)

    def _quantise(self, x: F32) -> F32:
        """Along the last axis, in groups (the last one of a row may be shorter)."""
        out = np.empty_like(x)
        for at in range(0, x.shape[-1], self.group):
            part = x[..., at : at + self.group]
            low, high = part.min(-1, keepdims=True), part.max(-1, keepdims=True)
            zero = low.astype(np.float16).astype(np.float32)
            scale = ((high - low) / (2**self.width - 1)).astype(np.float16).astype(np.float32)
            codes = np.clip(np.rint((part - zero) / np.where(scale > 0, scale, 1)), 0, 2**self.width - 1)
            out[..., at : at + self.group] = codes * scale + zero
        return out


@dataclass(frozen=True)
class Cast:
    """Every value cast to float8_e4m3fn as it is, as engines' fp8 caches do without a scale."""

    name: str = "fp8-cast"
    profile_bytes: int = 0

    def code(self, kv: KV) -> Coded:
        """Whole chunks."""
        chunks = kv.k.shape[2] // CHUNK_TOKENS
        decoded = KV(*(bits(e4m3(floats(side))) for side in kv))
        return Coded(decoded, [8 * (kv.k.size + kv.v.size) / chunks] * chunks)


def e4m3(x: F32) -> F32:
    """The nearest float8_e4m3fn, ties to even, beyond its range the largest."""
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)
    step = np.ldexp(np.float32(1), exponent - 3)
    return np.asarray(np.clip(np.rint(x / step) * step, -E4M3_MAX, E4M3_MAX), np.float32)


@dataclass(frozen=True)
class Jitter:
    """Every value moved up or down by one unit of bfloat16's last place, at random: what no codec can be held to."""

    name: str = "1-ulp"
    profile_bytes: int = 0

    def code(self, kv: KV) -> Coded:
        """Whole chunks."""
        random = np.random.default_rng(0)
        chunks = kv.k.shape[2] // CHUNK_TOKENS
        sides = []
        for side in kv:
            moved = side + random.integers(0, 2, side.shape, np.uint16) * np.uint16(2) - np.uint16(1)
            largest, smallest = np.uint16(0x7F7F), np.uint16(0x0080)
            normal = ((side & 0x7FFF) > smallest) & ((side & 0x7FFF) < largest)
            sides.append(np.where(normal, moved, side))
        return Coded(KV(*sides), [16.0 * (kv.k.size + kv.v.size) / chunks] * chunks)


@dataclass
class Pca:
    """Principal components of K (before its rotation) and V of a layer together, without weights of sensitivity.

    Fitted on other texts, as a profile would be: a mean and a basis for each layer, K and V each scaled to unit
    variance. One step for all components; first tokens exact. Bits: each component's best of 64 Laplace tables for
    each chunk, 8 bits to name it; the exact tokens at 16 bits.
    """

    step: float
    rope: Rope | None
    sinks: int = 4
    profile_bytes: int = 0
    _layers: list[tuple[F32, F32, F32]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``pca-0.5``."""
        return f"pca-{self.step:g}"

    def fit(self, texts: Iterable[KV]) -> None:
        """Learn from the KV of prefixes."""
        rows = [self._rows(kv, self.sinks) for kv in texts]
        self._layers = []
        for layer in range(len(rows[0])):
            x = np.concatenate([each[layer] for each in rows])
            mean, width = x.mean(0), x.shape[1] // 2
            variance = x.var(0)
            scale = np.sqrt(np.repeat([variance[:width].mean(), variance[width:].mean()], width)).astype(np.float32)
            y = (x - mean) / scale
            basis = np.linalg.eigh(y.T @ y)[1].astype(np.float32)
            self._layers.append((mean, scale, basis))
        # as profiles hold it: an int16 matrix and an fp32 scale and mean for each channel
        self.profile_bytes = sum(2 * basis.size + 8 * len(mean) for mean, _, basis in self._layers)

    def like(self, step: float) -> Pca:
        """The same with another step."""
        return Pca(step, self.rope, self.sinks, self.profile_bytes, self._layers)

    def code(self, kv: KV) -> Coded:
        """Whole chunks."""
        chunks = kv.k.shape[2] // CHUNK_TOKENS
        total = [0.0] * chunks
        decoded = KV(kv.k.copy(), kv.v.copy())
        heads, dim = kv.k.shape[1], kv.k.shape[3]
        for layer, (mean, scale, basis) in enumerate(self._layers):
            x = self._rows(kv.layer(layer), 0)[0]
            codes = np.rint((x - mean) / scale @ basis / self.step)
            y = (codes * self.step) @ basis.T * scale + mean
            for chunk in range(chunks):
                first = self.sinks if chunk == 0 else 0
                part = codes[chunk * CHUNK_TOKENS + first : (chunk + 1) * CHUNK_TOKENS]
                total[chunk] += laplace_bits(part) + 16.0 * first * codes.shape[1]
            k, v = (each.reshape(len(x), heads, dim).swapaxes(0, 1) for each in np.split(y, 2, 1))
            k = rotated(k, self.rope, 1)
            for side, back in zip(decoded, (k, v), strict=True):
                side[layer, :, self.sinks :] = bits(back[:, self.sinks :])
        return Coded(decoded, total)

    def _rows(self, kv: KV, first: int) -> list[F32]:
        """[tokens, K's channels and V's] of each layer, K not rotated."""
        k, v = rotated(floats(kv.k), self.rope, -1), floats(kv.v)
        both = (each.transpose(0, 2, 1, 3).reshape(len(each), each.shape[2], -1) for each in (k, v))
        return list(np.concatenate(list(both), 2)[:, first:])


def rotated(k: F32, rope: Rope | None, sign: int) -> F32:
    """Keys [..., tokens, dim] rotated to their positions from 0 on (sign 1), or back (-1)."""
    if rope is None:
        return k
    half = len(rope.inv_freq)
    angle = np.arange(k.shape[-2])[:, None] * np.array(rope.inv_freq) * sign
    factor = rope.factor**sign
    cos, sin = (np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32)
    one = slice(0, 2 * half, 2) if rope.interleaved else slice(0, half)
    two = slice(1, 2 * half, 2) if rope.interleaved else slice(half, 2 * half)
    a, b, out = k[..., one], k[..., two], np.array(k)
    out[..., one], out[..., two] = a * cos - b * sin, b * cos + a * sin
    return out


def laplace_bits(codes: F32) -> float:
    """Bits of integers [tokens, components] where each component has the best of 64 tables of a discrete Laplace
    distribution, p(q) ~ r^|q|, and a byte that names it."""
    ratio = 2.0 ** -(2.0 ** np.linspace(-5, 4, 64))
    zero = (1 - ratio) / (1 + ratio)
    size = np.abs(codes).sum(0)
    lengths: NDArray[np.float64] = -np.log2(zero) * len(codes) - np.log2(ratio) * size[:, None]
    return float(lengths.min(1).sum()) + 8 * len(size)
