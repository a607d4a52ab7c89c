"""What the sim's forward writes: bytes that depend on every token up to their place, the layer and the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_MASK = (1 << 64) - 1
_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Chain:
    """One sequence of tokens under one set of weights. ``who``: what else sets it apart (salt, adapter)."""

    def __init__(self, weights: int, who: str = "", tokens: Sequence[int] = ()) -> None:
        seed = int.from_bytes(who.encode()[-6:], "little")
        self._hashes = [_mix(weights * 1_000_003 + seed)]
        self._bytes: dict[tuple[int, int], Bytes] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._hashes) - 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._hashes.append(_mix(self._hashes[-1] ^ (int(token) + 1) * 0x9E3779B97F4A7C15 & _MASK))

    def grow(self, tokens: Sequence[int]) -> None:
        """Append what ``tokens``, all of them, has beyond this chain."""
        self.extend(tokens[len(self) :])

    def next_token(self, vocabulary: int = 500) -> int:
        """The token that follows all those there are."""
        return self._hashes[-1] % vocabulary

    def after(self, layer: int, width: int) -> Bytes:
        """[tokens + 1, width]: row ``i`` belongs to the first ``i`` tokens (row 0 to none)."""
        known = self._bytes.get((layer, width))
        have = 0 if known is None else len(known)
        if have < len(self._hashes):
            hashes = np.array(self._hashes[have:], np.uint64)[:, None]
            with np.errstate(over="ignore"):
                places = np.arange(1, width + 1, dtype=np.uint64) * _A + np.uint64(layer + 1) * _C
                mixed = (hashes ^ places) * _B
                mixed = (mixed ^ (mixed >> np.uint64(29))) * _C
            rows = (mixed >> np.uint64(56)).astype(np.uint8)
            known = self._bytes[layer, width] = rows if known is None else np.concatenate([known, rows])
        assert known is not None
        return known
