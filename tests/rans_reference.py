"""The entropy coder of docs/codecs.md ("Entropy coder stream") in plain Python, symbol by symbol: what streams must be.

Written from the format's description, with big integers and lists; it shares nothing with csrc/.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

LANES, LOW, VERSION = 32, 1 << 16, 0xA1
Table = Sequence[int]


def turns() -> list[int]:
    """The lanes in the order in which they take words: 0 to 3, 16 to 19, 4 to 7, 20 to 23, ..."""
    return [lane for first in range(0, 16, 4) for half in (0, 16) for lane in range(first + half, first + half + 4)]


def slots(freqs: Table, bits: int) -> list[tuple[int, int]]:
    """(symbol, offset) of every slot: in order of symbols, or by alias tables where there are at most 16."""
    if len(freqs) > 16:
        return [(symbol, offset) for symbol, freq in enumerate(freqs) for offset in range(freq)]
    size = (1 << bits) // 16
    left = [*freqs, *[0] * (16 - len(freqs))]
    buckets: dict[int, list[tuple[int, int]]] = {}
    while True:
        small = next((s for s in range(16) if s not in buckets and left[s] < size), None)
        if small is None:
            break
        large = next(s for s in range(16) if s not in buckets and left[s] > size)
        lent = size - left[small]
        left[large] -= lent
        own = [(small, offset) for offset in range(left[small])]
        buckets[small] = own + [(large, left[large] + offset) for offset in range(lent)]
    for s in range(16):
        buckets.setdefault(s, [(s, offset) for offset in range(size)])
    return [place for s in range(16) for place in buckets[s]]


def encode(symbols: Sequence[bytes], tables: Sequence[int], freqs: Sequence[Table], bits: int, streams: int) -> bytes:
    """Rows of symbols, equally long."""
    each = -(-len(symbols) // streams)
    parts = [range(i * each, min((i + 1) * each, len(symbols))) for i in range(streams)]
    maps = [{place: slot for slot, place in enumerate(slots(table, bits))} for table in freqs]
    words, bodies = [], []
    for part in parts:
        x, out = [LOW] * LANES, []
        for row in reversed(part):
            freq, slot_of = freqs[tables[row]], maps[tables[row]]
            text = symbols[row]
            for group in reversed(range(0, len(text), LANES)):
                for lane in reversed(turns()):
                    if group + lane >= len(text):
                        continue
                    s = text[group + lane]
                    if x[lane] >= freq[s] << (32 - bits):
                        out.append(x[lane] & 0xFFFF)
                        x[lane] >>= 16
                    quotient, offset = divmod(x[lane], freq[s])
                    x[lane] = quotient << bits | slot_of[s, offset]
        words.append(len(out))
        bodies.append(struct.pack(f"<{LANES}I{len(out)}H", *x, *reversed(out)))
    return struct.pack(f"<BB{streams}I", VERSION, streams, *words) + b"".join(bodies)


def decode(
    src: bytes, tables: Sequence[int], freqs: Sequence[Table], bits: int, rows: int, cols: int
) -> list[bytes] | None:
    """The rows; None where the stream is not one."""
    if len(src) < 2 or src[0] != VERSION or not 1 <= src[1] <= min(rows, 16) or len(src) < 2 + 4 * src[1]:
        return None
    streams, maps = src[1], [slots(table, bits) for table in freqs]
    words = struct.unpack_from(f"<{streams}I", src, 2)
    if len(src) != 2 + streams * (4 + 4 * LANES) + 2 * sum(words):
        return None
    each, at, out = -(-rows // streams), 2 + 4 * streams, []
    for stream, count in enumerate(words):
        x = list(struct.unpack_from(f"<{LANES}I", src, at))
        left = list(struct.unpack_from(f"<{count}H", src, at + 4 * LANES))[::-1]
        at += 4 * LANES + 2 * count
        if min(x) < LOW:
            return None
        for row in range(stream * each, min((stream + 1) * each, rows)):
            freq, places = freqs[tables[row]], maps[tables[row]]
            text = bytearray(cols)
            for group in range(0, cols, LANES):
                for lane in turns():
                    if group + lane >= cols:
                        continue
                    text[group + lane], offset = places[x[lane] & (1 << bits) - 1]
                    x[lane] = freq[text[group + lane]] * (x[lane] >> bits) + offset
                    if x[lane] < LOW:
                        if not left:
                            return None
                        x[lane] = x[lane] << 16 | left.pop()
            out.append(bytes(text))
        if left or x != [LOW] * LANES:
            return None
    return out
