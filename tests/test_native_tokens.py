"""Token ids of any kind as the words that are hashed."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import _native as native

# No deadline: a busy machine is not a failure.
UNTIMED = settings(deadline=None)


@UNTIMED
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_keep_their_values(values: list[int]) -> None:
    for same in (values, tuple(values), np.array(values, np.int64), np.array(values, np.uint32)):
        tokens = native.tokens_u32(same)
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == values


@pytest.mark.parametrize("dtype", ["b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "<i4", "<u8", "=i2"])
def test_tokens_of_every_integer_dtype_and_stride(dtype: str) -> None:
    source = np.arange(100, dtype=dtype)
    assert native.tokens_u32(source).tolist() == list(range(100))
    assert native.tokens_u32(source[::-3]).tolist() == list(range(99, -1, -3))
    assert native.tokens_u32(array.array("i", [1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (2, 4), (4, 99), (5, 9), (7, 9), (3, 3), (3, 1), (1, -1)])
def test_a_range_of_tokens_is_their_slice(start: int, stop: int) -> None:
    values = [7, 2**31, 2**30, 0, 2**32 - 1]
    for same in (values, tuple(values), np.array(values, np.int64), np.array(values, np.uint32)):
        assert native.tokens_u32(same, start, stop).tolist() == values[start : max(stop, 0)]
    assert (
        native.tokens_u32(np.array(values, np.uint32)[::-1], start, stop).tolist() == values[::-1][start : max(stop, 0)]
    )
    with pytest.raises(ValueError, match="start"):
        native.tokens_u32(values, -1)
    with pytest.raises(ValueError, match="token 1 "):
        native.tokens_u32([*values, -1], 4)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_contiguous_words_are_not_copied_and_stay_alive(dtype: type) -> None:
    source = np.arange(10, dtype=dtype)
    tokens = native.tokens_u32(source)
    assert np.shares_memory(source, tokens)
    del source
    assert tokens.tolist() == list(range(10))
    readonly = np.arange(4, dtype=dtype)
    readonly.flags.writeable = False
    assert native.tokens_u32(readonly).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70, -(2**70), True, False, 1.0, "7", None, np.float32(2)])
def test_a_wrong_token_is_named(wrong: Any) -> None:
    for container in (list, tuple):
        with pytest.raises(ValueError, match="token 3 "):
            native.tokens_u32(container([5, 6, 2**32 - 1, wrong, -1]))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_a_negative_token_in_an_array_is_named(dtype: type) -> None:
    with pytest.raises(ValueError, match="token 2 "):
        native.tokens_u32(np.array([1, 2, -3, -4], dtype))
    with pytest.raises(ValueError, match="token 1 "):
        native.tokens_u32(np.array([1, 2**32], np.uint64))


NO_TOKENS = [b"abc", bytearray(b"abc"), "abc", 7, None, {1, 2}, np.zeros((2, 2), np.int32), np.zeros(3)]
NO_TOKENS += [np.zeros(2, bool), np.zeros(2, ">i4"), np.array(3), np.zeros(2, "c8"), np.zeros(2, [("a", "i4")])]


@pytest.mark.parametrize("wrong", NO_TOKENS, ids=repr)
def test_what_is_no_row_of_integers_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="tokens must"):
        native.tokens_u32(wrong)


def test_integers_that_are_not_int_count_too() -> None:
    class Index:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    assert native.tokens_u32([np.int64(4), np.uint8(5), Index(6)]).tolist() == [4, 5, 6]

    class Shrinking(Index):
        def __index__(self) -> int:
            victims.clear()
            return self.value

    victims: list[Any] = [1, Shrinking(2), 3]
    with pytest.raises(ValueError, match="token 2 "):
        native.tokens_u32(victims)
