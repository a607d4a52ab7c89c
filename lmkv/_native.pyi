"""The C++ core (csrc/). Addresses are plain integers; nothing here owns them except a Slab.

Calls that touch more than 64 KiB release the GIL. A wrong argument is a ValueError (a TypeError for a wrong
type) raised before anything is changed. After fork every call works in the child.
"""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

@final
class Slab:
    """A private anonymous mapping of zeros, aligned to 2 MiB, in huge pages when asked and possible.

    fd: the first ``nbytes`` of this file instead, shared with everyone who maps it; the descriptor may be closed
    afterwards. MemoryError when it cannot be mapped, or the file is shorter. close() unmaps, as does the end of the
    object: no address in it may be used afterwards.
    """

    def __init__(self, nbytes: int, huge: bool = True, fd: int = -1) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """The size asked for, rounded up to whole pages."""

    def touch(self, start: int, stop: int) -> None:
        """Faults in the pages of bytes [start, stop); changes no byte, also beside concurrent writers."""

    def close(self) -> None: ...

def memory(address: int, nbytes: int) -> memoryview:
    """A writable view of bytes that somebody else keeps alive."""

def zero(address: int, nbytes: int) -> None: ...

@final
class CopyPlan:
    """Where the pages of one group lie in an engine and in a chunk's payload.

    planes: int64[n, 11], a row for each layer (or its K, or its V): engine_base, payload_offset, page_stride,
    payload_page_stride, run_bytes, n0, engine_stride0, payload_stride0, n1, engine_stride1, payload_stride1.
    For page p at chunk position j and every a < n0, b < n1, run_bytes are copied between
    ``engine_base + p*page_stride + a*engine_stride0 + b*engine_stride1`` and
    ``slot + payload_offset + j*payload_page_stride + a*payload_stride0 + b*payload_stride1``.
    ValueError names the plane whose counts, payload range or addresses are wrong.
    """

    def __init__(self, planes: NDArray[np.int64], payload_bytes: int) -> None: ...
    @property
    def planes(self) -> int: ...
    @property
    def bytes_per_page(self) -> int:
        """Bytes copied for one page, all planes together."""

def copy_pages(
    plan: CopyPlan,
    gather: bool,
    slots: NDArray[np.int64],
    page_ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    first: NDArray[np.int64],
    threads: int = 1,
    stream_bytes: int = 4 << 20,
) -> None:
    """Copies pages into slots (gather) or back (scatter).

    Chunk i copies page_ids[starts[i]:starts[i + 1]] at chunk positions first[i], first[i] + 1, ... of the
    payload at slots[i]. Every index is checked against the payload first (ValueError, nothing copied). The
    caller guarantees that the pages exist, that slots have payload_bytes and that no two copies of one call
    write the same bytes. Calls that move stream_bytes or more go around the caches.
    """

def tokens_u32(tokens: Any, start: int = 0, stop: int = ...) -> NDArray[np.uint32]:
    """Token ids [start, stop) as uint32, from a list or tuple of ints or a one-dimensional integer array.

    A contiguous int32 or uint32 array is not copied. ValueError names, counted from ``start``, the first token that
    is no integer in [0, 2**32); a bool is none.
    """

def blake3(data: Buffer, key: bytes | None = None) -> bytes:
    """BLAKE3 of data, 32 bytes; the keyed hash when a 32-byte key is given."""

def leaf_digests(tokens: NDArray[np.uint32], chunk_tokens: int) -> list[bytes]:
    """BLAKE3 of the little-endian token ids of each full chunk."""

def chain_digests(
    tokens: NDArray[np.uint32], chunk_tokens: int, key: bytes, prev: bytes, extras: list[bytes | None] | None = None
) -> list[bytes]:
    """digest_i = keyed BLAKE3(digest_{i-1} || leaf_i || extra_i) of each full chunk, digest_{-1} = prev.

    extras holds one item (None, or at most 32 bytes) for each full chunk.
    """

def parse_key(text: str) -> tuple[bytes, bytes, bytes, bytes, int, int, int] | None:
    """The fields of a chunk key's text: scope, tenant, digest, parent, depth, group, shard; None for any other text."""

def xxh3_64(data: Buffer) -> int:
    """XXH3, 64 bits, seed 0."""

def checksums(address: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """XXH3-64 of the ranges [address + offsets[i], + lengths[i])."""

def read_file(path: str, address: int, capacity: int, direct: bool, extent: int = 4 << 20, threads: int = 4) -> int:
    """Reads a whole file into memory; returns its size, or -errno.

    -EFBIG: larger than capacity. -EBADMSG: its size is 0 or no multiple of 4096, or it is no regular file.
    -EIO: it ended early. -EINVAL with direct: O_DIRECT refused (or address not aligned to 4096).
    ``threads`` extents are in flight.
    """

def write_file(
    tmp: str, path: str, address: int, nbytes: int, direct: bool, fsync: bool, extent: int = 4 << 20, threads: int = 4
) -> int:
    """Writes a new file tmp (mode 0600; -EEXIST when it exists) and renames it to path; 0 or -errno.

    With fsync, data and name are on stable storage when it returns 0. Every failure removes tmp and leaves
    path as it was, except a failed sync of the folder, which comes after the rename.
    """

def list_dir(path: str) -> list[tuple[str, int, int]]:
    """(name, size, mtime in ns) of the regular files in a folder, in no order. OSError when unreadable."""

def cpu_features() -> dict[str, bool | str | int]:
    """What the core found: simd level in use, arch, cpus, avx2, avx512f."""

def limit_simd(level: str) -> str:
    """Uses nothing above "portable", "avx2" or "avx512"; returns the level now in use. For tests."""

def rans_encode(
    symbols: NDArray[np.uint8],
    tables: NDArray[np.uint16],
    freqs: NDArray[np.uint16],
    bits: int,
    out: Buffer,
    streams: int = 0,
) -> int:
    """Entropy-codes ``symbols[rows, cols]`` into ``out``; the bytes written, 0 when they do not fit.

    tables[rows]: the row of ``freqs[T, A]`` each row is coded by. Each row of freqs sums to ``1 << bits``, bits 8 to
    12, A at most 256; up to 16 is several times faster. streams: independent streams that the rows are cut into (at
    most 16, and no more than rows), 0: as many as cost little. ValueError: a symbol without frequency.
    """

def rans_decode(
    src: Buffer, tables: NDArray[np.uint16], freqs: NDArray[np.uint16], bits: int, symbols: NDArray[np.uint8]
) -> None:
    """Fills ``symbols[rows, cols]``. ValueError: ``src`` is corrupt, truncated, or has bytes left over.

    What ``symbols`` then holds is unspecified. A stream does not tell tables apart: pass those that it was made with.
    """

def xpl_encode(
    values: Buffer,
    type: tuple[int, int, int],  # noqa: A002
    starts: NDArray[np.int64],
    count0: int,
    stride0: int,
    count1: int,
    stride1: int,
    dim: int,
    out: Buffer,
) -> int:
    """Codes rows of floats exactly; the bytes written to ``out``, 0 when they do not fit.

    type: bytes of a value, its exponent bits, its mantissa bits: of bfloat16, float16, float32 or an 8-bit float. Row
    i is the runs of ``dim`` values at ``starts[i] + a * stride0 + b * stride1`` for every a < count0, b < count1,
    counted in values. Each row has its own frequency table, each of its ``dim`` channels its own offset.
    """

def xpl_decode(
    src: Buffer,
    type: tuple[int, int, int],  # noqa: A002
    starts: NDArray[np.int64],
    count0: int,
    stride0: int,
    count1: int,
    stride1: int,
    dim: int,
    values: Buffer,
) -> int:
    """The opposite; the bytes of ``src`` that it took. ValueError: ``src`` is corrupt or truncated."""

def coefficients_decode(
    src: Buffer,
    tables: NDArray[np.uint16],
    shifts: NDArray[np.uint8],
    freqs: NDArray[np.uint16],
    bits: int,
    defaults: NDArray[np.uint8] | None,
    q: NDArray[np.int16],
) -> None:
    """Fills ``q[rows, cols]`` from a whole stream of coefficients, as `lmkv.codec.coefficients` lays them out.

    tables, shifts: of each row id; freqs and bits as in `rans_decode`. defaults: the id expected of each row, None: the
    stream's own. ValueError: it is no stream of this size.
    """

def coefficients_split(
    q: NDArray[np.int16],
    rows: NDArray[np.uint32],
    shifts: NDArray[np.uint8],
    tables: NDArray[np.uint16],
    freqs: NDArray[np.uint16],
    symbols: NDArray[np.uint8],
    low: Buffer,
    escapes: Buffer,
) -> int:
    """The opposite; how many int16 it wrote to ``escapes``, which has room for as many as symbols.

    tables: the row of ``freqs[T, 16]`` of each row; symbols without frequency there are escaped.
    """

def coefficients_counts(q: NDArray[np.int16], rows: NDArray[np.uint32], shift: int, counts: NDArray[np.uint32]) -> None:
    """``counts[rows, 16]``: how often each symbol stands in each of these rows of ``q`` under this shift."""

def coefficients_squares(q: NDArray[np.int16], squares: NDArray[np.int64]) -> None:
    """The sum of squares of each row of ``q``."""

@final
class KltMatrix:
    """An int16 matrix [C, K] of an inverse transform, in the order in which the transform reads it. Immutable."""

    def __init__(self, matrix: NDArray[np.int16]) -> None: ...

def klt_transform(
    matrix: KltMatrix,
    q: NDArray[np.int16],
    scale: NDArray[np.float32],
    mean: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """``out[T, C]`` = `lmkv.codec.klt_reference.transform`, bit for bit, its axes exchanged. q: [K, T]; zeros cost
    little."""

def klt_cos_sin(
    inv_freq: NDArray[np.float64], first: int, factor: float, cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> None:
    """cos and sin [tokens, pairs] = `lmkv.codec.klt_reference.cos_sin` from token ``first`` on, bit for bit."""

def klt_write_bf16(
    x: NDArray[np.float32],
    cos: NDArray[np.float32] | None,
    sin: NDArray[np.float32] | None,
    interleaved: bool,
    sizes: tuple[int, ...],
    places: tuple[int, ...],
    words: Buffer,
) -> None:
    """Rotates K (or V: cos None) ``x[layers, heads * dim, tokens]`` and writes it as bfloat16, bit for bit as
    `lmkv.codec.klt_reference` does.

    cos, sin: [tokens, pairs]. sizes: layers, pages, tokens of a page, heads, dim. places: the first word in ``words``,
    then the steps from layer to layer, page to page, token to token, head to head, channel to channel, in words.
    """

def klt_read_bf16(
    words: Buffer,
    cos: NDArray[np.float32] | None,
    sin: NDArray[np.float32] | None,
    interleaved: bool,
    sizes: tuple[int, ...],
    places: tuple[int, ...],
    x: NDArray[np.float32],
) -> int:
    """The opposite: a rotation by cos and sin is taken back. The largest word without its sign, 0x7F80 or more where
    a number is not finite."""

def klt_write_block(
    matrix: KltMatrix,
    q: NDArray[np.int16],
    scale: NDArray[np.float32],
    mean: NDArray[np.float32],
    cos: NDArray[np.float32] | None,
    sin: NDArray[np.float32] | None,
    interleaved: bool,
    places: list[tuple[tuple[int, ...], tuple[int, ...]]],
    words: Buffer,
) -> None:
    """`klt_transform`, then `klt_write_bf16` of its channels: in each layer those of each of the one or two
    ``places`` (sizes and places), of which the first is rotated."""
