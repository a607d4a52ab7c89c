"""What a weights fingerprint notices, and what it must not depend on."""

from __future__ import annotations

from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import BadInput
from lmkv.fingerprint import PIECES, SAMPLE_BYTES, fingerprint, sample

Tensor = tuple[str, tuple[int, ...], str, Any]
BIG = np.arange(100_000, dtype=np.uint32)
TENSORS: list[Tensor] = [
    ("a", (2, 3), "float32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("b", (100_000,), "uint32", BIG),
    ("empty", (0, 4), "float32", b""),
]
CONFIG = {"model_type": "llama", "rope": {"theta": 1e4, "kind": None}, "layers": [1, 2]}


def changed(number: int, **fields: Any) -> list[Tensor]:
    names = ("name", "shape", "dtype", "data")
    tensor = tuple((dict(zip(names, TENSORS[number], strict=True)) | fields).values())
    return [tensor if i == number else each for i, each in enumerate(TENSORS)]


def test_fingerprint_is_golden() -> None:
    def fields(*texts: bytes) -> bytes:
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)

    raw = BIG.tobytes()
    starts = [(400_000 - 4096) * i // 15 for i in range(16)]
    pieces = b"".join(raw[start : start + 4096] for start in starts)
    config = b'{"layers": [1, 2], "model_type": "llama", "rope": {"kind": null, "theta": 10000.0}}'
    digests = [
        blake3.blake3(fields(*tensor)).digest()
        for tensor in (
            (b"a", b"2,3", b"float32", b"24", np.arange(6, dtype=np.float32).tobytes()),
            (b"b", b"100000", b"uint32", b"400000", pieces),
            (b"empty", b"0,4", b"float32", b"0", b""),
        )
    ]
    expected = blake3.blake3(fields(b"lmkv weights v1", config, *digests)).hexdigest()
    assert fingerprint(TENSORS, CONFIG) == expected
    assert expected == "4d5498258677258a85c6459cd83ee2f6985fc8668817055a6fda2f7669380124"


def test_order_and_buffer_type_do_not_count() -> None:
    whole = fingerprint(TENSORS, CONFIG)
    assert fingerprint(reversed(TENSORS), CONFIG) == whole
    assert fingerprint(changed(1, data=BIG.tobytes()), CONFIG) == whole
    assert fingerprint(changed(1, data=memoryview(bytearray(BIG.tobytes()))), CONFIG) == whole
    reordered = {key: CONFIG[key] for key in reversed(CONFIG)}
    assert fingerprint(TENSORS, reordered) == whole
    noted = CONFIG | {"_name_or_path": "/here", "transformers_version": "6"}
    noted["rope"] = {"theta": 1e4, "kind": None, "transformers_version": "5"}
    assert fingerprint(TENSORS, noted) == whole


def test_everything_that_is_looked_at_changes_it() -> None:
    variants = [
        fingerprint(TENSORS, CONFIG),
        fingerprint(TENSORS, CONFIG | {"layers": [2, 1]}),
        fingerprint(TENSORS, {}),
        fingerprint(TENSORS, "text"),
        fingerprint(TENSORS[:2], CONFIG),
        fingerprint(changed(0, name="c"), CONFIG),
        fingerprint(changed(0, shape=(3, 2)), CONFIG),
        fingerprint(changed(0, shape=(6,)), CONFIG),
        fingerprint(changed(0, dtype="int32"), CONFIG),
        fingerprint(changed(1, data=BIG[:-1]), CONFIG),
        fingerprint(changed(1, data=np.append(BIG, np.uint32(0))), CONFIG),
    ]
    assert len(set(variants)) == len(variants)


@given(size=st.integers(0, 4 * SAMPLE_BYTES), data=st.data())
def test_a_change_of_any_sampled_byte_changes_it(size: int, data: st.DataObject) -> None:
    raw = bytearray(size)
    before = fingerprint([("t", (size,), "uint8", raw)], "")
    if not size:
        return
    marked = np.zeros(size, np.uint8)
    piece = SAMPLE_BYTES // PIECES
    starts = [(size - piece) * i // (PIECES - 1) for i in range(PIECES)]
    for start in starts if size > SAMPLE_BYTES else [0]:
        marked[start : start + (piece if size > SAMPLE_BYTES else size)] = 1
    at = data.draw(st.sampled_from([0, size - 1, *np.flatnonzero(marked)[:: max(1, size // 50)]]))
    raw[at] = 1
    assert fingerprint([("t", (size,), "uint8", raw)], "") != before


def test_samples_are_64_kib_from_start_to_end() -> None:
    pages = np.arange((15 * 17 + 1) * 1024, dtype=np.uint32)
    taken = np.frombuffer(sample(pages.view(np.uint8).data), np.uint32)
    expected = [pages[i * 17 * 1024 : (i * 17 + 1) * 1024] for i in range(PIECES)]
    assert taken.tolist() == np.concatenate(expected).tolist()
    odd = sample(memoryview(bytes(SAMPLE_BYTES) + b"x"))
    assert (len(odd), odd[-1:]) == (SAMPLE_BYTES, b"x")
    small = bytes(range(200))
    assert sample(memoryview(small)) == small


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(BadInput, match="weights_id"):
        fingerprint([], CONFIG)
    with pytest.raises(BadInput, match="'a'"):
        fingerprint([TENSORS[0], TENSORS[0]], CONFIG)
    with pytest.raises(BadInput, match="contiguous"):
        fingerprint(changed(1, data=BIG[::2]), CONFIG)
    with pytest.raises(BadInput, match="JSON"):
        fingerprint(TENSORS, {"x": object()})
