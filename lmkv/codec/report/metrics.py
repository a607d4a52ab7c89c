"""Statistics of a report: per-position figures of two next-token distributions, and bootstrap intervals over texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
RESAMPLES = 2000


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


class Positions(NamedTuple):
    """Figures of each position, [positions]. kl: KL(exact || decoded) in nats; agree: both have the same likeliest
    token; loss, exact_loss: -log p of the text's next token, with decoded and with exact KV."""

    kl: F64
    agree: F64
    loss: F64
    exact_loss: F64


def log_softmax(logits: Any) -> F64:
    """Log probabilities of logits [positions, vocabulary], in float64."""
    x: F64 = np.array(logits, np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def compare(exact: F64, decoded: F64, targets: NDArray[np.int64]) -> Positions:
    """Two sets of log probabilities [positions, vocabulary] and the tokens [positions] that came next."""
    # sum of p log(p / q) as sum of q f(p / q), f(r) = r log r - r + 1 >= 0: no term cancels another
    gap = exact - decoded
    p = np.exp(exact)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = p * gap - (p - np.exp(decoded))
    kl = np.where(p > 0, terms, np.exp(decoded)).sum(-1)
    place = np.arange(len(targets)), targets
    agree = (exact.argmax(-1) == decoded.argmax(-1)).astype(np.float64)
    return Positions(np.maximum(kl, 0.0), agree, -decoded[place], -exact[place])


@dataclass(frozen=True)
class Resampling:
    """Bootstrap of ``texts`` texts with ``positions`` figures each: texts are drawn with replacement, then positions
    within each drawn text. The same draws serve every method, so that differences between methods are paired."""

    texts: int
    positions: int
    resamples: int = RESAMPLES
    seed: int = 0

    def draw(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Texts [resamples, texts] and positions [resamples, texts, positions]."""
        random = np.random.default_rng(self.seed)
        texts = random.integers(0, self.texts, (self.resamples, self.texts))
        return texts, random.integers(0, self.positions, (self.resamples, self.texts, self.positions))

    def interval(self, statistic: Callable[..., Any], *figures: F64) -> Interval:
        """``statistic`` of the means of ``figures``, each [texts, positions] or [texts], over all texts.

        statistic: takes one mean of each (a number, or an array [resamples]). The interval is from the 2.5th to the
        97.5th percentile of the resamples; with one text, it speaks of positions only.
        """
        texts, positions = self.draw()
        means, drawn = [], []
        for each in figures:
            means.append(each.mean())
            if each.ndim == 1:
                drawn.append(each[texts].mean(1))
            else:
                drawn.append(each[texts[:, :, None], positions].mean((1, 2)))
        low, high = np.percentile(statistic(*drawn), (2.5, 97.5))
        return Interval(float(statistic(*means)), float(low), float(high))


def mean(x: Any) -> Any:
    """A statistic for `Resampling.interval`."""
    return x


def perplexity_change(loss: Any, exact_loss: Any) -> Any:
    """Perplexity with decoded KV over that with exact KV, less 1."""
    return np.expm1(loss - exact_loss)


def break_even(raw: float, encoded: float, seconds: float) -> float:
    """Bytes a second of a link below which sending ``encoded`` bytes and decoding them in ``seconds`` is sooner done
    than sending ``raw`` bytes: raw / b > encoded / b + seconds. 0: never; infinite: on every link."""
    saved = raw - encoded
    if saved <= 0:
        return 0.0
    return saved / seconds if seconds > 0 else float("inf")


def median(values: Sequence[float]) -> float:
    """Of a few figures; NaN of none."""
    return float(np.median(values)) if len(values) else float("nan")
