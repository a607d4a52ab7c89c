"""What the codec report counts: its statistics against torch and arithmetic, and its baselines."""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import tiny as build

from lmkv.codec.report.baselines import Cast, Jitter, Kivi, Pca, e4m3, laplace_bits, rotated
from lmkv.codec.report.methods import profile_bits
from lmkv.codec.report.metrics import Resampling, break_even, compare, log_softmax, mean, perplexity_change
from lmkv.codec.report.model import KV, bits, floats, rope_of


def kv_of(seed: int, tokens: int = 512, layers: int = 2, heads: int = 2, dim: int = 16) -> KV:
    random = np.random.default_rng(seed)
    shape = (layers, heads, tokens, dim)
    return KV(*(bits(random.normal(0, 2, shape).astype(np.float32)) for _ in range(2)))


def error(one: KV, other: KV) -> float:
    return max(float(np.abs(floats(a) - floats(b)).max()) for a, b in zip(one, other, strict=True))


# Statistics


def test_kl_of_two_coins() -> None:
    exact, decoded = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    found = compare(exact, decoded, np.array([1]))
    assert found.kl[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-12)
    assert found.loss[0] == pytest.approx(-math.log(0.75))
    assert found.exact_loss[0] == pytest.approx(math.log(2))
    assert found.agree[0] == 0.0  # the first of equals against the second


def test_figures_are_torchs() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(0, 6, (2, 7, 1000)).astype(np.float32)
    targets = random.integers(0, 1000, 7)
    exact, decoded = (torch.from_numpy(each).double() for each in logits)
    found = compare(log_softmax(logits[0]), log_softmax(logits[1]), targets)
    p, q = exact.log_softmax(-1), decoded.log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(found.kl, kl.numpy(), rtol=1e-10)
    for mine, theirs in ((found.loss, decoded), (found.exact_loss, exact)):
        loss = torch.nn.functional.cross_entropy(theirs, torch.from_numpy(targets), reduction="none")
        np.testing.assert_allclose(mine, loss.numpy(), rtol=1e-10)
    assert found.agree.tolist() == (exact.argmax(-1) == decoded.argmax(-1)).double().tolist()


def test_kl_of_the_same_is_exactly_zero_and_never_negative() -> None:
    logits = np.random.default_rng(2).normal(0, 10, (5, 5000)).astype(np.float32)
    assert compare(log_softmax(logits), log_softmax(logits), np.zeros(5, int)).kl.tolist() == [0.0] * 5
    near = logits + np.float32(1e-6)
    assert (compare(log_softmax(logits), log_softmax(near), np.zeros(5, int)).kl >= 0).all()
    impossible = np.array([[0.0, -1e9]])  # a probability that is 0 in floating point
    assert compare(log_softmax(impossible), log_softmax(impossible[:, ::-1]), np.array([0])).kl[0] > 1e8


def test_interval_of_texts_is_that_of_the_normal_law() -> None:
    """Positions of a text alike: the interval is mean +- 1.96 s / sqrt(texts)."""
    values = np.repeat(np.random.default_rng(3).normal(5, 2, (400, 1)), 3, 1)
    found = Resampling(400, 3, resamples=4000).interval(mean, values)
    half = 1.96 * values[:, 0].std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(found.value - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.value + half, abs=0.1 * half)


def test_interval_counts_texts_not_positions() -> None:
    """With texts that differ and positions that do not, more positions do not narrow it."""
    by_text = np.random.default_rng(4).normal(0, 1, (12, 1))
    few, many = (Resampling(12, n).interval(mean, np.repeat(by_text, n, 1)) for n in (2, 200))
    assert many.high - many.low == pytest.approx(few.high - few.low, rel=0.1)
    one = Resampling(1, 300, resamples=4000).interval(mean, np.random.default_rng(5).normal(0, 1, (1, 300)))
    assert one.high - one.low == pytest.approx(2 * 1.96 / math.sqrt(300), rel=0.15)


def test_interval_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(6).exponential(1, 60)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=9999, rng=0).confidence_interval
    mine = Resampling(60, 1, resamples=9999).interval(mean, values)
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), rel=0.03)


def test_perplexity_change_and_break_even() -> None:
    losses = np.full((3, 2), 2.0), np.full((3, 2), 2.0 - math.log(1.5))
    assert Resampling(3, 2).interval(perplexity_change, *losses) == pytest.approx((0.5, 0.5, 0.5))
    speed = break_even(100, 40, 0.5)
    assert speed == 120
    assert 100 / speed == pytest.approx(40 / speed + 0.5)
    assert break_even(100, 100, 0.1) == 0
    assert break_even(100, 10, 0) == math.inf


def test_a_profile_of_27_mb_costs_0_43_bits_over_a_gigabyte() -> None:
    assert profile_bits(27_000_000) == pytest.approx(27e6 * 8 / 5e8)
    assert profile_bits(0) == 0


# Numbers and baselines


def test_rounding_is_torchs() -> None:
    values = np.random.default_rng(7).normal(0, 30, 20_000).astype(np.float32)
    theirs = torch.from_numpy(values).bfloat16()
    assert (bits(values).view(np.int16) == theirs.view(torch.int16).numpy()).all()
    assert (floats(bits(values)) == theirs.float().numpy()).all()
    values = np.concatenate([values, np.ldexp(values, -12), np.arange(-448, 448, 0.5, np.float32), [448, -500, 0]])
    clamped = torch.from_numpy(values.astype(np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert (e4m3(values.astype(np.float32)) == clamped.numpy()).all()


def test_kivi_by_hand() -> None:
    """Two bits over 0, 1, 2.2, 3: zero point 0, scale 1, so 2.2 comes back as 2."""
    k = np.zeros((1, 1, 256, 1), np.float32)
    k[0, 0, :4, 0] = 0, 1, 2.2, 3
    coded = Kivi(2).code(KV(bits(k), bits(k)))
    assert floats(coded.kv.k)[0, 0, :4, 0].tolist() == [0, 1, 2, 3]
    # 8 groups of 32 tokens for K's channel, a group of one channel for each of V's tokens
    assert coded.bits == [2 * 512 + 32 * (8 + 256)]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_kivi_is_within_half_a_step(width: int) -> None:
    kv = kv_of(8, dim=32)
    coded = Kivi(width).code(kv)
    assert sum(coded.bits) == (width + 1) * 2 * kv.k.size
    k, back = floats(kv.k).reshape(2, 2, 16, 32, 32), floats(coded.kv.k).reshape(2, 2, 16, 32, 32)
    step = (k.max(3, keepdims=True) - k.min(3, keepdims=True)) / (2**width - 1)
    assert (np.abs(k - back) <= 0.52 * step + 0.02).all()


def test_cast_and_jitter() -> None:
    kv = kv_of(9)
    assert error(kv, Cast().code(kv).kv) <= 0.5
    moved = Jitter().code(kv).kv
    assert set(np.unique(np.abs(moved.k.astype(int) - kv.k))) == {1}
    assert sum(Jitter().code(kv).bits) == 16 * 2 * kv.k.size


def test_laplace_lengths_are_a_code() -> None:
    """Probabilities of a table sum to one, and no code is shorter than the entropy of what it codes."""
    ratio = 0.7
    assert (1 - ratio) / (1 + ratio) * (1 + 2 * sum(ratio**q for q in range(1, 200))) == pytest.approx(1)
    random = np.random.default_rng(10)
    codes = np.rint(random.laplace(0, 2, (50_000, 1)))
    _, counts = np.unique(codes, return_counts=True)
    entropy = -np.sum(counts * np.log2(counts / counts.sum()))
    assert entropy < laplace_bits(codes) < 1.02 * entropy
    assert laplace_bits(np.zeros((256, 3), np.float32)) < 3 * (8 + 256 * 0.01)


def test_pca_of_few_directions_is_exact_and_small() -> None:
    """KV of three hidden directions: three components hold it, the others cost almost nothing."""
    random = np.random.default_rng(11)
    mix = random.normal(0, 1, (3, 64)).astype(np.float32)

    def made(seed: int) -> KV:
        x = np.random.default_rng(seed).normal(0, 1, (1, 512, 3)).astype(np.float32) @ mix
        return KV(*(bits(side.reshape(1, 512, 2, 16).swapaxes(1, 2)) for side in np.split(x, 2, -1)))

    pca = Pca(0.05, None)
    pca.fit([made(1), made(2)])
    coded = pca.code(made(3))
    assert error(made(3), coded.kv) < 0.2
    assert sum(coded.bits) / (512 * 64) < 1.2
    assert (coded.kv.k[:, :, :4] == made(3).k[:, :, :4]).all()
    assert pca.like(0.5).profile_bytes == pca.profile_bytes == 64 * 64 * 2 + 8 * 64


@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}])
def test_rotation_is_transformers(scaling: Any) -> None:
    changes = {"rope_parameters": scaling} if scaling else {}
    model = build("llama", **changes)
    rope = rope_of(model)
    assert rope is not None
    assert (rope.factor == 1.0) == (scaling is None)
    k = torch.randn(1, 2, 40, 16)
    cos, sin = model.model.rotary_emb(k, torch.arange(40)[None])
    _, theirs = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(k, k, cos, sin)
    mine = rotated(k[0].numpy(), rope, 1)
    np.testing.assert_allclose(mine, theirs[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(rotated(mine, rope, -1), k[0].numpy(), atol=1e-5)
