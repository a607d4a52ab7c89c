"""The bandwidth below which a codec shortens a load: computed, and checked on a loopback link of limited rate.

    python bench/codec_links.py --codecs zstd,fp8,q8,kch:4
    python bench/codec_links.py --model FOLDER --text FILE --codecs xpl,q8,kch:4,klt:3 --profile FILE --around

One thread sends containers through a TCP connection on 127.0.0.1 at the rate of a token bucket; the other receives
each into memory and decodes it before it asks for the next, as one load thread does. Raw bytes, encoded ones and
decoding alone take turns; the least of each counts. `pays below` is computed: (raw - encoded bytes) / decode seconds.
A codec should be the faster one at rates below, the slower one above, and either within a third of it; `--around` adds
links of half and twice that rate. KV is that of a model over a text, or smooth random (rotated AR(1) channels of
different scales), for which there is no profile.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmkv import chunk
from lmkv.cli.output import emit
from lmkv.codec import Meaning, Rope, decode_container, encode_container
from lmkv.codec.profile import open_profile
from lmkv.codec.report.baselines import rotated
from lmkv.codec.report.methods import ThroughCodec, chosen
from lmkv.codec.report.metrics import break_even
from lmkv.codec.report.model import AXES, KV, Geometry, Model, bits
from lmkv.codec.report.texts import read_file
from lmkv.keys import ChunkKey
from lmkv.spec import Kind, KVSpec, LayerGroup

CHUNK = 256
BURST = 1 << 16
LEAST, MOST = 0.1, 10.0  # Gbit/s of links


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
    return Geometry(KVSpec((group,), CHUNK), Meaning("bfloat16", heads, dim, dim, AXES, rope, layers, CHUNK))


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


def of_model(folder: str, text: Path, tokens: int) -> tuple[KV, Geometry]:
    """A model's own KV, and how it is stored."""
    model = Model(folder, threads=1)
    return model.prefill(model.encode(read_file(text))[:tokens]), model.geometry


class Timed(NamedTuple):
    """One link: Gbit/s, and the least seconds of a load of raw containers and of encoded ones."""

    gbit: float
    plain: float
    coded: float


def measured(raw: Load, encoded: Load, links: Sequence[float], around: bool, runs: int) -> tuple[list[Timed], float]:
    """Every link, and the least seconds of decoding alone."""
    room = memoryview(bytearray(max(map(len, raw.bodies))))
    seconds = min(decoded(encoded, room) for _ in range(runs))
    if around and (pays := _gbit(raw, encoded, seconds)):
        links = sorted({*links, *(round(pays * factor, 3) for factor in (0.5, 2) if MOST > pays * factor > LEAST)})
    found = []
    for gbit in links:
        turns = [
            (transfer(raw, gbit * 1e9 / 8, room), transfer(encoded, gbit * 1e9 / 8, room), decoded(encoded, room))
            for _ in range(runs)
        ]
        plain, coded, alone = (min(each) for each in zip(*turns, strict=True))
        seconds = min(seconds, alone)
        found.append(Timed(gbit, plain, coded))
    return found, seconds


def _gbit(raw: Load, encoded: Load, seconds: float) -> float:
    """The bandwidth below which the codec shortens a load."""
    return break_even(raw.nbytes, encoded.nbytes, seconds) * 8 / 1e9


def rows(name: str, raw: Load, encoded: Load, times: Sequence[Timed], seconds: float) -> list[dict[str, Any]]:
    """A row a link: what was found, and what the formula says."""
    pays, made = _gbit(raw, encoded, seconds), []
    for gbit, plain, coded in times:
        near = 0.7 < gbit / pays < 1.4 if pays else False
        made.append(
            {"codec": name, "bits/value": round(16 * encoded.nbytes / raw.nbytes, 3), "link Gbit/s": gbit}
            | {"raw ms": 1e3 * plain, "computed": 8e3 * raw.nbytes / gbit / 1e9, "encoded ms": 1e3 * coded}
            | {"by formula": 8e3 * encoded.nbytes / gbit / 1e9 + 1e3 * seconds}
            | {"expected": "either" if near else "faster" if gbit < pays else "slower"}
            | {"found": "faster" if coded < plain else "slower"}
        )
    return made


def verdict(raw: Load, encoded: Load, seconds: float, links: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a codec's rows come to."""
    faster = [row["link Gbit/s"] for row in links if row["found"] == "faster"]
    slower = [row["link Gbit/s"] for row in links if row["found"] == "slower"]
    as_expected = sum(row["expected"] in ("either", row["found"]) for row in links)
    speed = raw.nbytes / seconds / 1e9
    return (
        {"codec": links[0]["codec"], "bits/value": links[0]["bits/value"], "decode GB/s": round(speed, 3)}
        | {"pays below Gbit/s": round(_gbit(raw, encoded, seconds), 3)}
        | {"faster up to": max(faster, default=None), "slower from": min(slower, default=None)}
        | {"as expected": f"{as_expected} of {len(links)}"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codecs", default="zstd,fp8,q8,kch:4", help="as `lmkv codec report` takes them")
    parser.add_argument("--profile", default="", help="a profile's file, for klt")
    parser.add_argument("--model", help="a model's folder: its KV instead of random numbers")
    parser.add_argument("--text", type=Path, help="what it reads")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 0.3, 1, 3, 10])
    parser.add_argument("--around", action="store_true", help="also half and twice the computed rate, to 0.1 and 10")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    a = parser.parse_args()
    if bool(a.model) != bool(a.text):
        parser.error("--model and --text go together")
    kv, shape = of_model(a.model, a.text, a.tokens) if a.model else synthetic(a.layers, a.heads, a.dim, a.tokens)
    identity = open_profile(a.profile).id if a.profile else ""
    found, verdicts = [], []
    for method in chosen(a.codecs.split(","), shape, identity):
        raw, encoded = loads(kv, method)
        times, seconds = measured(raw, encoded, a.gbit, a.around, a.runs)
        mine = rows(method.name, raw, encoded, times, seconds)
        found += mine
        verdicts.append(verdict(raw, encoded, seconds, mine))
    emit(found)
    right = sum(row["expected"] in ("either", row["found"]) for row in found)
    print(f"{right} of {len(found)} as expected\n")
    emit(verdicts)


if __name__ == "__main__":
    main()
