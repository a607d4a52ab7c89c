"""A cache's values as fp32 and back: bfloat16, float16 and float32, rounded to nearest even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.codec.klt_reference import to_bfloat16

F32 = NDArray[np.float32]
FP16_MAX = np.float32(65504)
WIDE = ("bfloat16", "float16", "float32")  # what the lossy codecs take


def widen(words: NDArray[Any], dtype: str) -> F32:
    """The values of ``words`` (unsigned, of the dtype's width), exactly, as a new fp32 array of the same shape."""
    if dtype == "bfloat16":
        value: F32 = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return value
    return np.ascontiguousarray(words).view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def narrow(x: F32, dtype: str) -> NDArray[Any]:
    """Unsigned words of ``dtype`` nearest to finite ``x``; beyond fp16's range its largest number."""
    if dtype == "bfloat16":
        return to_bfloat16(x)
    if dtype == "float16":
        return np.clip(x, -FP16_MAX, FP16_MAX).astype("<f2").view("<u2")
    return x.astype("<f4").view("<u4")
