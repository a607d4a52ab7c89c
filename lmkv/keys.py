"""What a stored chunk is called, and what it stands for.

A :class:`Scope` names everything that changes the bytes of any chunk. Within it a chunk is named by
``digest_i = BLAKE3_keyed(key, digest_{i-1} || leaf_i || extras_i)``: ``leaf_i`` is BLAKE3 of its
token ids (u32 little-endian), the key comes from the tenant's salt, the chain starts at the adapter
and ``extras_i`` (only where media lie in the chunk) is 32 bytes for their ids and places. Digests
are the same on every machine, in every process and Python version.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from lmkv import _native
from lmkv.errors import BadInput

SCOPE_BYTES = 16
DIGEST_BYTES = 32
FIRST_BATCH, GROWTH = 16, 8
NO_TENANT = bytes(8)
_NO_ROOT = bytes(DIGEST_BYTES)


def encode(*values: str | bytes) -> bytes:
    """Values as bytes that no other values give: each after its length (u32 little-endian)."""
    raw = [f.encode() if isinstance(f, str) else f for f in values]
    return b"".join(struct.pack("<I", len(f)) + f for f in raw)


@dataclass(frozen=True)
class Scope:
    """Everything that changes the bytes stored for given tokens; two scopes never share a chunk.

    weights: fingerprint or ``weights_id``. geometry: page layout text, ``KVSpec.geometry()`` and
    the engine's layout. hash: the algorithm of the chunk digests, which may be the engine's own.
    epoch: fresh random text after the weights changed in place. extra: more (name, value) pairs,
    in any order.
    """

    weights: str
    kv_dtype: str
    geometry: str
    chunk_tokens: int
    hash: str = "blake3"
    epoch: str = ""
    extra: tuple[tuple[str, str], ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for the scope in every key."""
        pairs = [text for pair in sorted(self.extra) for text in pair]
        named = (self.weights, self.kv_dtype, self.geometry, str(self.chunk_tokens))
        text = encode("lmkv scope v1", *named, self.hash, self.epoch, *pairs)
        return _native.blake3(text)[:SCOPE_BYTES]

    def describe(self) -> str:
        """The digest and the fields as lines of ``name: value``, for people."""
        named = [f"{field.name}: {getattr(self, field.name)}" for field in fields(self)]
        return "\n".join([f"scope: {self.digest.hex()}", *named])


class ChunkKey(NamedTuple):
    """The name of one stored container: a chunk's part for one group of layers and one shard.

    scope 16 bytes, tenant 8, digest 32, parent 8 (first bytes of the digest before it, or of the
    chain's root), depth: the chunk's place in its prompt, from 0 (u32); group, shard: u16.
    """

    scope: bytes
    tenant: bytes
    digest: bytes
    parent: bytes
    depth: int
    group: int
    shard: int

    def __str__(self) -> str:
        """``scope-tenant-digest-parent-depth-group-shard``, safe as a file and object name."""
        return (
            f"{self.scope.hex()}-{self.tenant.hex()}-{self.digest.hex()}-{self.parent.hex()}"
            f"-{self.depth}-{self.group}-{self.shard}"
        )

    @classmethod
    def parse(cls, text: str) -> ChunkKey:
        """The key whose ``str`` is exactly ``text``; anything else is BadInput."""
        fields = _native.parse_key(text)
        if fields is None:
            raise BadInput(f"not a chunk key: {text[:200]!r}")
        return cls._make(fields)


@lru_cache(maxsize=1024)
def _roots(salt: bytes, adapter: str) -> tuple[bytes, bytes, bytes]:
    """(BLAKE3 key, tenant tag, root of the chain)."""
    key = _native.blake3(b"lmkv chunk chain v1" + salt)
    tenant = _native.blake3(b"lmkv tenant", key)[:8] if salt else NO_TENANT
    return key, tenant, _native.blake3(encode(adapter), key) if adapter else _NO_ROOT


@dataclass(frozen=True)
class Identity:
    """What sets a request's chunks apart from others with the same tokens.

    salt: a tenant's secret (text counts as its UTF-8); it keys the hash, so that who does not know
    it can neither name nor guess the chunks. adapter: LoRA or the like. media: (id, start, stop),
    tokens [start, stop) stand for the picture or sound ``id``. BadInput: a range that is none.
    """

    salt: str | bytes = ""
    adapter: str = ""
    media: tuple[tuple[str, int, int], ...] = ()

    def __post_init__(self) -> None:
        for name, start, stop in self.media:
            if not 0 <= start < stop < 2**63:
                raise BadInput(f"media {name!r} covers no tokens: [{start}, {stop})")

    @property
    def roots(self) -> tuple[bytes, bytes, bytes]:
        """(BLAKE3 key, tenant tag of 8 bytes, root of the digest chain)."""
        salt = self.salt.encode() if isinstance(self.salt, str) else self.salt
        return _roots(salt, self.adapter)

    @property
    def tenant(self) -> bytes:
        """8 bytes by which a tenant's chunks can be listed and cleared; zeros without a salt."""
        return self.roots[1]

    def extras(self, first: int, stop: int, chunk_tokens: int) -> list[bytes | None] | None:
        """A digest of its media or None for each chunk in [first, stop); None when all are None."""
        inside: dict[int, list[tuple[str, int, int]]] = {}
        for name, start, end in self.media:
            for i in range(max(first, start // chunk_tokens), min(stop, -(-end // chunk_tokens))):
                at = i * chunk_tokens
                inside.setdefault(i, []).append((name, start - at, end - at))
        if not inside:
            return None
        return [self._media_digest(inside[i]) if i in inside else None for i in range(first, stop)]

    def _media_digest(self, items: Iterable[tuple[str, int, int]]) -> bytes:
        packed = b"".join(encode(name, struct.pack("<qq", *span)) for name, *span in sorted(items))
        return _native.blake3(packed, self.roots[0])


NOBODY = Identity()


class ChunkKeys:
    """Digests of the full chunks of a prompt, hashed when asked for: 16 chunks, then seven times as many again.

    A miss at the first chunk costs one batch; a whole prompt is linear. Tokens are read when their
    batch is, so a bad item far into a list is found (BadInput) only when that is reached; the
    sequence must not change meanwhile. Tokens after the last full chunk are never read. Threads may
    share one.

    tokens, chunks: how many there are, chunks counting full ones. tenant: 8 bytes. root: 32 bytes.
    """

    def __init__(self, count: int, chunk_tokens: int, tenant: bytes = NO_TENANT) -> None:
        if chunk_tokens < 1:
            raise BadInput(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self.tokens, self.chunk_tokens, self.chunks = count, chunk_tokens, count // chunk_tokens
        self.tenant, self.root = tenant, _NO_ROOT
        self._source: Any = ()
        self._identity, self._key = NOBODY, b""
        self._digests: list[bytes] = []
        self._lock = threading.Lock()

    @classmethod
    def from_tokens(cls, tokens: Any, chunk_tokens: int, identity: Identity = NOBODY) -> ChunkKeys:
        """Keys of a prompt: a list or tuple of ints, or any 1-D integer array (int32: no copy).

        Too short or empty: zero chunks. BadInput: not a sequence of integers from 0 to 2^32 - 1.
        """
        if not isinstance(tokens, (list, tuple)):
            tokens = np.asarray(tokens)
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise BadInput(f"token ids are 1-D integers, not {tokens.ndim}-D {tokens.dtype}")
        keys = cls(len(tokens), chunk_tokens)
        keys._source, keys._identity = tokens, identity
        keys._key, keys.tenant, keys.root = identity.roots
        return keys

    @classmethod
    def from_digests(cls, digests: Sequence[bytes], chunk_tokens: int, tenant: bytes = NO_TENANT) -> ChunkKeys:
        """Keys that an engine computed: 32 bytes a chunk, each covering all tokens before it."""
        keys = cls(len(digests) * chunk_tokens, chunk_tokens, tenant)
        if len(tenant) != len(NO_TENANT) or set(map(len, digests)) - {DIGEST_BYTES}:
            raise BadInput("digests have 32 bytes each and a tenant has 8")
        keys._digests = list(digests)
        return keys

    def upto(self, n: int) -> list[bytes]:
        """The digests of the first ``n`` chunks, or of all if there are fewer."""
        self._reach(n)
        return self._digests[:n]

    def after(self, n: int) -> list[bytes]:
        """The digests from chunk ``n`` on as far as they are hashed, at least one; none at the end of the prompt."""
        self._reach(n + 1)
        return self._digests[n:]

    def digest(self, i: int) -> bytes:
        """The digest of chunk ``i``; IndexError when there is no such full chunk."""
        if not 0 <= i < self.chunks:
            raise IndexError(f"chunk {i} of {self.chunks}")
        self._reach(i + 1)
        return self._digests[i]

    def _reach(self, n: int) -> None:
        """Hash on until the first ``n`` chunks have digests."""
        n = min(n, self.chunks)
        if len(self._digests) < n:
            with self._lock:
                done = len(self._digests)
                if done < n:
                    self._hash(done, min(self.chunks, max(n, GROWTH * done, FIRST_BATCH)))

    def _hash(self, first: int, stop: int) -> None:
        at, prev = first * self.chunk_tokens, self._digests[-1] if first else self.root
        try:
            ids = _native.tokens_u32(self._source, at, stop * self.chunk_tokens)
        except ValueError as error:
            raise BadInput(f"token ids, counted from {at}: {error}") from None
        extras = self._identity.extras(first, stop, self.chunk_tokens)
        self._digests += _native.chain_digests(ids, self.chunk_tokens, self._key, prev, extras)

    def parent(self, i: int) -> bytes:
        """The first 8 bytes of the digest before chunk ``i``, or of the root."""
        return (self.digest(i - 1) if i else self.root)[:8]

    def key(self, i: int, scope: bytes, group: int = 0, shard: int = 0) -> ChunkKey:
        """The storage key of chunk ``i`` for one group and shard; scope: ``Scope.digest``."""
        return ChunkKey(scope, self.tenant, self.digest(i), self.parent(i), i, group, shard)
