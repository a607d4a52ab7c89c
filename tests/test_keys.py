"""Scopes, chunk keys, and the digests of a prompt's chunks."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from itertools import combinations
from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import BadInput
from lmkv.keys import NOBODY, ChunkKey, ChunkKeys, Identity, Scope

SCOPE = Scope("w1", "bfloat16", "layers=2", 256)


def prefixed(*fields: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def by_hand(
    tokens: list[int],
    chunk_tokens: int,
    salt: bytes = b"",
    adapter: bytes = b"",
    extras: dict[int, bytes] | None = None,
) -> list[bytes]:
    """The definition in docs/format.md, with PyPI's BLAKE3."""
    key = blake3.blake3(b"lmkv chunk chain v1" + salt).digest()
    digest = blake3.blake3(prefixed(adapter), key=key).digest() if adapter else bytes(32)
    digests = []
    for i in range(len(tokens) // chunk_tokens):
        ids = tokens[i * chunk_tokens : (i + 1) * chunk_tokens]
        leaf = blake3.blake3(struct.pack(f"<{chunk_tokens}I", *ids)).digest()
        digest = blake3.blake3(digest + leaf + (extras or {}).get(i, b""), key=key).digest()
        digests.append(digest)
    return digests


keys_strategy = st.builds(
    ChunkKey,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
)


@given(keys_strategy)
def test_a_key_survives_its_text(key: ChunkKey) -> None:
    assert ChunkKey.parse(str(key)) == key
    assert len(str(key)) < 200
    assert set(str(key)) <= set("0123456789abcdef-")


def test_key_text_is_fixed() -> None:
    key = ChunkKey(b"\1" * 16, bytes(8), b"\xab" * 32, b"\2" * 8, 7, 1, 3)
    text = f"{'01' * 16}-{'00' * 8}-{'ab' * 32}-{'02' * 8}-7-1-3"
    assert str(key) == text
    assert f"{key}" == text
    for wrong in (
        "", text[1:], text.upper(), text + "0" * 10, text + "\n", " " + text, text.replace("-", "_"),
        text.replace("-7-", "-07-"), text.replace("-7-", "-4294967296-"), text[:-1] + "65536",
        text.replace("-7-", "--7-"), text[:-1] + "٣", text.replace("-7-", "-7.0-"),
    ):  # fmt: skip
        with pytest.raises(BadInput):
            ChunkKey.parse(wrong)


@given(st.text(max_size=200))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        ChunkKey.parse(text)


def test_scope_digest_is_golden_and_ignores_the_order_of_extras() -> None:
    fields = (b"lmkv scope v1", b"w1", b"bfloat16", b"layers=2", b"256", b"blake3", b"")
    assert SCOPE.digest == blake3.blake3(prefixed(*fields)).digest()[:16]
    assert SCOPE.digest.hex() == "6361f1b68a351c8a2244f435f80d2127"
    one = Scope("w", "d", "g", 16, extra=(("a", "1"), ("b", "2")))
    other = Scope("w", "d", "g", 16, extra=(("b", "2"), ("a", "1")))
    assert one.digest == other.digest
    assert "weights: w\n" in one.describe()
    assert one.digest.hex() in one.describe()


def test_scopes_differ_in_every_field() -> None:
    scopes = [
        SCOPE,
        Scope("w2", "bfloat16", "layers=2", 256),
        Scope("w1", "float16", "layers=2", 256),
        Scope("w1", "bfloat16", "layers=3", 256),
        Scope("w1", "bfloat16", "layers=2", 128),
        Scope("w1", "bfloat16", "layers=2", 256, hash="sha256"),
        Scope("w1", "bfloat16", "layers=2", 256, epoch="e"),
        Scope("w1", "bfloat16", "layers=2", 256, extra=(("e", ""),)),
        Scope("w1", "bfloat16", "layers=2", 256, extra=(("", "e"),)),
        Scope("w1bfloat16", "", "layers=2", 256),
        Scope("", "w1bfloat16", "layers=2", 256),
    ]
    assert len({scope.digest for scope in scopes}) == len(scopes)


TOKENS = list(range(1000, 1000 + 80))
IDENTITIES: dict[str, Identity] = {
    "none": NOBODY,
    "salt": Identity(salt="a"),
    "other salt": Identity(salt="b"),
    "adapter": Identity(adapter="a"),
    "other adapter": Identity(adapter="b"),
    "salt and adapter": Identity(salt="a", adapter="a"),
    "media": Identity(media=(("a", 3, 5),)),
    "other media": Identity(media=(("b", 3, 5),)),
    "media elsewhere": Identity(media=(("a", 4, 6),)),
    "longer media": Identity(media=(("a", 3, 6),)),
    "two media": Identity(media=(("a", 3, 5), ("a", 6, 7))),
    "media twice": Identity(media=(("a", 3, 5), ("a", 3, 5))),
}


@pytest.mark.parametrize(("one", "other"), list(combinations(IDENTITIES, 2)))
def test_identities_share_no_chunk(one: str, other: str) -> None:
    first = ChunkKeys.from_tokens(TOKENS, 16, IDENTITIES[one])
    second = ChunkKeys.from_tokens(TOKENS, 16, IDENTITIES[other])
    assert not set(first.upto(5)) & set(second.upto(5))


def test_chunk_sizes_and_token_changes_share_no_chunk() -> None:
    digests = [set(ChunkKeys.from_tokens(TOKENS, size).upto(99)) for size in (8, 16, 32)]
    for one, other in combinations(digests, 2):
        assert not one & other
    changed = [*TOKENS[:20], 5, *TOKENS[21:]]
    before, after = (ChunkKeys.from_tokens(t, 16).upto(5) for t in (TOKENS, changed))
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after[1:])


@pytest.mark.parametrize("chunk_tokens", [1, 16, 17, 256])
def test_digests_follow_the_definition(chunk_tokens: int) -> None:
    tokens = [(i * 7919) % 2**32 for i in range(40 * chunk_tokens + chunk_tokens // 2)]
    tokens[0], tokens[1] = 2**32 - 1, 0
    keys = ChunkKeys.from_tokens(tokens, chunk_tokens)
    assert keys.upto(1000) == by_hand(tokens, chunk_tokens)
    salted = ChunkKeys.from_tokens(tokens, chunk_tokens, Identity(salt="pä", adapter="lora"))
    assert salted.upto(40) == by_hand(tokens, chunk_tokens, "pä".encode(), b"lora")
    assert Identity(salt="pä").roots == Identity(salt="pä".encode()).roots


def test_media_enter_as_the_definition_says() -> None:
    identity = Identity(media=(("cat", 20, 40), ("bee", 30, 31), ("tail", 95, 10**12)))
    key = blake3.blake3(b"lmkv chunk chain v1").digest()

    def digest(*items: tuple[bytes, int, int]) -> bytes:
        packed = b"".join(prefixed(name, struct.pack("<qq", a, b)) for name, a, b in items)
        return blake3.blake3(packed, key=key).digest()

    extras = {
        1: digest((b"bee", 14, 15), (b"cat", 4, 24)),
        2: digest((b"cat", -12, 8)),
        5: digest((b"tail", 15, 10**12 - 80)),
    }
    tokens = list(range(96))
    keys = ChunkKeys.from_tokens(tokens, 16, identity)
    assert keys.upto(6) == by_hand(tokens, 16, extras=extras)


def test_media_do_not_depend_on_their_order_or_on_the_batch() -> None:
    media = (("a", 300, 302), ("b", 290, 310), ("c", 0, 1))
    tokens = list(range(16 * 40))
    forward = ChunkKeys.from_tokens(tokens, 16, Identity(media=media))
    back = ChunkKeys.from_tokens(tokens, 16, Identity(media=media[::-1]))
    assert [forward.digest(i) for i in range(40)] == back.upto(40)


@pytest.mark.parametrize("span", [(5, 5), (6, 5), (-1, 5), (0, 2**63)])
def test_media_that_cover_nothing_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="cat"):
        Identity(media=(("cat", *span),))


def test_golden_digests() -> None:
    keys = ChunkKeys.from_tokens(list(range(64)), 32, Identity("s", "a", (("m", 33, 40),)))
    assert [d.hex() for d in keys.upto(2)] == [
        "1b288b1e06171bb67d41c8157c6bd564b130b63c6edf707e1cd503a0b3ef92cf",
        "7423a4621543c656810c27e14c8edcc1785daadc3aec720b29ad5c24c201670e",
    ]
    assert keys.tenant.hex() == "8cf8d8da84730ff3"
    plain = ChunkKeys.from_tokens(list(range(32)), 32)
    expected = "2d95f58d881c3d41d023a8a87f02cd6c3395f7d12c11d0ae8c7088e91caa29cf"
    assert plain.digest(0).hex() == expected


def test_tenant_is_a_keyed_hash_of_the_salt() -> None:
    key = blake3.blake3(b"lmkv chunk chain v1" + b"secret").digest()
    assert Identity(salt="secret").tenant == blake3.blake3(b"lmkv tenant", key=key).digest()[:8]
    assert NOBODY.tenant == bytes(8)
    assert ChunkKeys.from_tokens([], 4, Identity(salt="secret")).tenant != bytes(8)


PROGRAM = """
from lmkv.keys import *
keys = ChunkKeys.from_tokens(range(100), 16, Identity("s", "a", (("m", 3, 20), ("k", 3, 20))))
scope = Scope("w", "d", "g", 16, extra=(("x", "1"), ("a", "2")))
print(*[keys.key(i, scope.digest, 1, 2) for i in range(keys.chunks)])
"""


def test_keys_are_the_same_in_every_process() -> None:
    texts = set()
    for seed in ("0", "1", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        program = [sys.executable, "-c", PROGRAM]
        texts.add(subprocess.run(program, env=env, check=True, capture_output=True).stdout)
    assert len(texts) == 1
    assert len(texts.pop().split()) == 6


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS, tuple(TOKENS), range(1000, 1080), np.array(TOKENS, np.int32),
        np.array(TOKENS, np.uint32), np.array(TOKENS, np.int64), np.array(TOKENS, np.uint16),
        np.repeat(np.array(TOKENS, np.int32), 2)[::2],
    ],
    ids=["list", "tuple", "range", "int32", "uint32", "int64", "uint16", "strided"],
)  # fmt: skip
def test_every_kind_of_sequence_gives_the_same_keys(tokens: Any) -> None:
    assert ChunkKeys.from_tokens(tokens, 16).upto(5) == by_hand(TOKENS, 16)


@pytest.mark.parametrize("tokens", [[], (), [1] * 15, np.array([], np.int32), np.zeros(15, np.int32)])
def test_less_than_a_chunk_is_no_chunk(tokens: Any) -> None:
    keys = ChunkKeys.from_tokens(tokens, 16)
    assert (keys.chunks, keys.tokens, keys.upto(10)) == (0, len(tokens), [])
    with pytest.raises(IndexError):
        keys.digest(0)


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros((2, 16), np.int32), np.zeros(16, np.float32), np.array(5), "sixteen letters.",
        np.zeros(16, np.bool_), np.array(["a"] * 16),
    ],
    ids=["2-D", "float", "scalar", "text", "bool", "texts"],
)  # fmt: skip
def test_what_is_no_integer_sequence_is_refused(tokens: Any) -> None:
    with pytest.raises(BadInput):
        ChunkKeys.from_tokens(tokens, 16)


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, None, "a", True])
def test_a_bad_item_is_found_when_its_batch_is_reached(bad: Any) -> None:
    tokens: list[Any] = [1] * (16 * 20)
    tokens[16 * 16 + 5] = bad
    keys = ChunkKeys.from_tokens(tokens, 16)
    assert keys.digest(0) == by_hand([1] * 16, 16)[0]
    assert len(keys.upto(16)) == 16
    with pytest.raises(BadInput, match="256"):
        keys.digest(16)
    assert keys.digest(15) == by_hand([1] * 256, 16)[15]


class Watched:
    """A token that notes when it is read."""

    def __init__(self, at: int, read: list[int]) -> None:
        self.at, self.read = at, read

    def __index__(self) -> int:
        self.read.append(self.at)
        return 1


def test_batches_start_at_16_chunks_and_grow_eightfold() -> None:
    read: list[int] = []
    tokens: list[Any] = [Watched(i, read) for i in range(4 * 300 + 3)]
    keys, sizes = ChunkKeys.from_tokens(tokens, 4), []
    for i in range(300):
        keys.digest(i)
        sizes += [len(read)] if len(read) > sum(sizes[-1:]) else []
    assert sizes == [64, 512, 1200]
    assert read == list(range(1200))
    read.clear()
    whole = ChunkKeys.from_tokens(tokens, 4)
    assert whole.upto(300) == keys.upto(300)
    assert read == list(range(1200))


def test_digests_after_a_chunk_are_those_hashed_or_one_batch_more() -> None:
    keys = ChunkKeys.from_tokens(list(range(4 * 100)), 4)
    first = keys.after(0)
    assert len(first) == 16
    assert keys.after(5) == first[5:]
    assert len(keys.after(16)) == 84
    assert first + keys.after(16) == keys.upto(100)
    assert keys.after(100) == []


@given(st.integers(0, 90), st.lists(st.integers(0, 95), max_size=5))
def test_the_order_of_asking_changes_nothing(count: int, asked: list[int]) -> None:
    tokens = list(range(count * 3))
    keys = ChunkKeys.from_tokens(tokens, 3)
    for n in asked:
        assert keys.upto(n) == by_hand(tokens, 3)[:n]
    assert keys.upto(count) == by_hand(tokens, 3)


def test_threads_may_share_keys() -> None:
    tokens = list(range(16 * 500))
    expected = by_hand(tokens, 16)
    keys = ChunkKeys.from_tokens(tokens, 16)
    found: list[list[bytes]] = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait(timeout=10)
        found.append([keys.digest(i) for i in range(500)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [expected] * 4


def test_storage_keys_name_their_place() -> None:
    keys = ChunkKeys.from_tokens(TOKENS, 16, Identity(salt="s", adapter="a"))
    digests = keys.upto(5)
    assert keys.key(0, SCOPE.digest).parent == keys.root[:8] != bytes(8)
    key = keys.key(3, SCOPE.digest, 1, 2)
    assert key == ChunkKey(SCOPE.digest, keys.tenant, digests[3], digests[2][:8], 3, 1, 2)
    assert ChunkKeys.from_tokens(TOKENS, 16).parent(0) == bytes(8)
    for i in (-1, 5):
        with pytest.raises(IndexError):
            keys.key(i, SCOPE.digest)


def test_keys_from_an_engines_digests() -> None:
    digests = [bytes([i]) * 32 for i in range(3)]
    keys = ChunkKeys.from_digests(digests, 64, b"tenant-1")
    assert (keys.tokens, keys.chunks, keys.tenant) == (192, 3, b"tenant-1")
    assert keys.upto(9) == digests
    assert keys.key(2, SCOPE.digest, 0, 0).parent == b"\1" * 8
    assert keys.parent(0) == bytes(8)
    with pytest.raises(BadInput):
        ChunkKeys.from_digests([b"short"], 64)
    with pytest.raises(BadInput):
        ChunkKeys.from_digests(digests, 64, b"short")


def test_chunk_tokens_must_be_positive() -> None:
    for size in (0, -1):
        with pytest.raises(BadInput):
            ChunkKeys.from_tokens(TOKENS, size)
        with pytest.raises(BadInput):
            ChunkKeys.from_digests([], size)
