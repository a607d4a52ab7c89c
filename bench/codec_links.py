"""The bandwidth below which a codec shortens a load: computed, and checked on a loopback link of limited rate.

    python bench/codec_links.py --codecs zstd,fp8,q8,kch --gbit 0.1 0.3 1 3 10
    python bench/codec_links.py --kv KV.npz --codecs klt:2 --profile FILE --gbit 0.1 1 10

One thread sends containers through a TCP connection on 127.0.0.1 at the rate of a token bucket; the other receives
each into memory and decodes it before it asks for the next, as one load thread does. Raw bytes, encoded ones and
decoding alone take turns; the least of each is shown. `pays below` is (raw - encoded bytes) / decode seconds; a codec
should be the faster one at rates below, the slower one above, and either within a third of it. KV is smooth random
(rotated AR(1) channels of different scales) or that of a model: a file that `lmkv codec report --work` keeps.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmkv import chunk
from lmkv.cli.output import emit
from lmkv.codec import Meaning, Rope, decode_container, encode_container
from lmkv.codec.report.baselines import rotated
from lmkv.codec.report.methods import ThroughCodec, chosen
from lmkv.codec.report.metrics import break_even
from lmkv.codec.report.model import AXES, KV, Geometry, bits
from lmkv.keys import ChunkKey
from lmkv.spec import Kind, KVSpec, LayerGroup

CHUNK = 256
BURST = 1 << 16


class Bucket:
    """Sends at ``rate`` bytes a second, in bursts of at most 64 KiB, over any length of time."""

    def __init__(self, rate: float) -> None:
        self.rate, self.level, self.at = rate, 0.0, time.perf_counter()

    def send(self, link: socket.socket, data: memoryview) -> None:
        while len(data):
            size = min(len(data), BURST)
            while self._short(size):
                time.sleep(max(0.0, (size - self.level) / self.rate - 5e-5))
            link.sendall(data[:size])
            self.level -= size
            data = data[size:]

    def _short(self, size: int) -> bool:
        now = time.perf_counter()
        # unspent time is lost beyond one burst, but for what the last sleep overslept
        self.level = min(self.level + (now - self.at) * self.rate, BURST + 1e-3 * self.rate)
        self.at = now
        return self.level < size


class Load(NamedTuple):
    """Containers of a prefix: their bytes, and headers to decode them by (None: raw, nothing to decode)."""

    bodies: list[memoryview]
    headers: list[chunk.Header] | None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.bodies))


def synthetic(layers: int, heads: int, dim: int, tokens: int) -> tuple[KV, Geometry]:
    """KV that resembles a model's: correlated tokens, channels of different scale and mean, keys rotated."""
    random = np.random.default_rng(0)
    shape = (2, layers, heads, tokens, dim)
    x = random.normal(0, 1, shape).astype(np.float32)
    for token in range(1, tokens):
        x[..., token, :] += 0.5 * x[..., token - 1, :]
    x *= random.lognormal(0, 0.5, (2, layers, heads, 1, dim)).astype(np.float32)
    x += random.normal(0, 1.5, (2, layers, heads, 1, dim)).astype(np.float32)
    rope = Rope(tuple((1e5 ** -(np.arange(dim // 2) / (dim // 2))).tolist()))
    return KV(bits(rotated(x[0], rope, 1)), bits(x[1])), geometry(layers, heads, dim, rope)


def geometry(layers: int, heads: int, dim: int, rope: Rope) -> Geometry:
    group = LayerGroup(Kind.FULL, tuple(range(layers)), CHUNK, heads, dim)
    return Geometry(KVSpec((group,), CHUNK), Meaning("bfloat16", heads, dim, dim, AXES, rope))


def loads(kv: KV, method: ThroughCodec) -> tuple[Load, Load]:
    """The prefix as raw and as encoded containers."""
    raw, encoded = Load([], None), Load([], [])
    size = chunk.container_bytes(method.geometry.spec, 0)
    for depth in range(kv.k.shape[2] // CHUNK):
        key = ChunkKey(bytes(16), bytes(8), bytes(32), bytes(8), depth, 0, 0)
        header = chunk.new_header(method.geometry.spec, key, created=0)
        body, packed = memoryview(bytearray(size)), memoryview(bytearray(size))
        method.fill(body, header, kv.part(slice(depth * CHUNK, (depth + 1) * CHUNK)))
        made = encode_container(body, header, method.codec, packed, method.geometry.meaning.of_part)
        raw.bodies.append(body)
        encoded.bodies.append(packed[: made.total_bytes] if made else body)
        encoded.headers.append(made or header)  # type: ignore[union-attr]
    return raw, encoded


def decoded(load: Load, room: memoryview) -> float:
    """Seconds that decoding takes, with nothing beside it."""
    start = time.perf_counter()
    for body, header in zip(load.bodies, load.headers or (), strict=True):
        decode_container(body, header, room)
    return time.perf_counter() - start


def transfer(load: Load, rate: float, room: memoryview) -> float:
    """Seconds until all of it has come through a link of ``rate`` bytes a second and is decoded."""
    into = memoryview(bytearray(max(map(len, load.bodies))))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server, load, rate))
        sender.start()
        with socket.create_connection(server.getsockname()) as link:
            link.sendall(b"!")
            start = time.perf_counter()
            for number, body in enumerate(load.bodies):
                view = into[: len(body)]
                while len(view):
                    view = view[link.recv_into(view) or _closed() :]
                if load.headers:
                    decode_container(into[: len(body)], load.headers[number], room)
                link.sendall(b"!")  # the next one is only asked for now
            seconds = time.perf_counter() - start
        sender.join()
    return seconds


def _send(server: socket.socket, load: Load, rate: float) -> None:
    link, _ = server.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.recv(1)
        bucket = Bucket(rate)
        for body in load.bodies:
            bucket.send(link, body)
            link.recv(1)


def _closed() -> int:
    raise ConnectionError("the link was closed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codecs", default="zstd,fp8,q8,kch")
    parser.add_argument("--profile", default="", help="a profile's file")
    parser.add_argument("--kv", type=Path, help="KV of a model, as kept by `lmkv codec report --work`")
    parser.add_argument("--theta", type=float, default=1e5, help="of the model's rope, with --kv")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 0.3, 1, 3, 10])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    a = parser.parse_args()
    if a.kv:
        with np.load(a.kv, allow_pickle=False) as saved:
            kv = KV(saved["k"], saved["v"]).crop(a.tokens)
        layers, heads, _, dim = kv.k.shape
        shape = geometry(layers, heads, dim, Rope(tuple((a.theta ** -(np.arange(dim // 2) / (dim // 2))).tolist())))
    else:
        kv, shape = synthetic(a.layers, a.heads, a.dim, a.tokens)
    identity = ""
    if a.profile:
        from lmkv.codec.profile import open_profile

        identity = open_profile(a.profile).id
    room = memoryview(bytearray(chunk.container_bytes(shape.spec, 0)))
    rows: list[dict[str, Any]] = []
    for method in chosen(a.codecs.split(","), shape, identity):
        raw, encoded = loads(kv, method)
        for gbit in a.gbit:
            times = [
                (transfer(raw, gbit * 1e9 / 8, room), transfer(encoded, gbit * 1e9 / 8, room), decoded(encoded, room))
                for _ in range(a.runs)
            ]
            plain, coded, seconds = (min(each) for each in zip(*times, strict=True))
            pays = break_even(raw.nbytes, encoded.nbytes, seconds) * 8 / 1e9
            near = 0.7 < gbit / pays < 1.4 if pays else False
            rows.append(
                {"codec": method.name, "bits/value": round(16 * encoded.nbytes / raw.nbytes, 3), "link Gbit/s": gbit}
                | {"raw ms": 1e3 * plain, "computed": 8e3 * raw.nbytes / gbit / 1e9, "encoded ms": 1e3 * coded}
                | {"by formula": 8e3 * encoded.nbytes / gbit / 1e9 + 1e3 * seconds, "pays below": round(pays, 3)}
                | {"expected": "either" if near else "faster" if gbit < pays else "slower"}
                | {"found": "faster" if coded < plain else "slower"}
            )
    emit(rows)
    wrong = [row for row in rows if row["expected"] not in ("either", row["found"])]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as expected")


if __name__ == "__main__":
    main()
