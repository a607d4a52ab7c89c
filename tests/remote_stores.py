"""The remote stores behind one interface, as real processes: what a test does to one it can do to all."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import cache_servers
import redis_servers
import s3_servers

from lmkv import chunk


class Store(ABC):
    """``url``: of the tier. `down` and `up` keep the port; ``keeps``: what was stored is there after `up`."""

    keeps = False
    url: str
    port: int

    def through(self, place: str) -> str:
        """The URL of the tier by way of a proxy at ``place``."""
        return self.url.replace(f"127.0.0.1:{self.port}", place)

    @abstractmethod
    def up(self) -> None:
        """Start it again."""

    @abstractmethod
    def down(self) -> None:
        """kill -9."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""

    @abstractmethod
    def end(self) -> None:
        """For good, whatever it is at."""

    @abstractmethod
    def flip(self) -> int:
        """Change one bit in the middle of every object; returns how many there are."""


class Cache(Store):
    """`lmkv server`, with a disk tier unless ``disk`` is false."""

    def __init__(self, folder: Path, *options: str, disk: bool = True, **settings: object) -> None:
        self.disk, self.keeps = folder / "disk", disk
        # Memory for all a test puts four times over: a server drops disk writes beyond a quarter of it.
        settings = {"cpu_budget": "256MiB", **settings}
        if disk:
            settings["tiers"] = f"disk://{self.disk}?budget=1GiB"
        self.server = cache_servers.Server(folder, *options, **settings)  # type: ignore[arg-type]
        self.url, self.port = f"lmkv://{self.server.address}", self.server.port

    def up(self) -> None:
        self.server.start()

    def down(self) -> None:
        """Once its disk has what was put: it is written in the background, and a kill would lose the rest."""
        if not self.keeps:
            self.server.kill()
            return
        with closing(self.server.client()) as client:
            stored = sum(map(len, client.scan()))
        redis_servers.wait_until(lambda: len(self.files()) >= stored, f"{stored} files on the server's disk")
        self.server.kill()

    def signal(self, number: signal.Signals) -> None:
        self.server.signal(number)

    def end(self) -> None:
        self.server.close()

    def files(self) -> list[Path]:
        """Of whole containers on its disk."""
        found = (each for scope in self.disk.glob("*") if scope.name != "tmp" for each in scope.rglob("*"))
        return [each for each in found if each.is_file() and each.stat().st_size > chunk.HEADER_BYTES]

    def flip(self) -> int:
        """On its disk; it is started again, so that none of it is in memory."""
        self.server.end()
        files = self.files()
        for file in files:
            data = bytearray(file.read_bytes())
            data[(chunk.HEADER_BYTES + len(data)) // 2] ^= 1
            file.write_bytes(data)
        self.server.start()
        return len(files)


class Valkey(Store):
    """One server without persistence."""

    def __init__(self, folder: Path) -> None:
        self.server = redis_servers.Server(redis_servers.valkey_binary(), folder / "valkey")
        self.url, self.port = f"valkey://127.0.0.1:{self.server.port}", self.server.port

    def up(self) -> None:
        self.server.start()

    def down(self) -> None:
        self.server.kill()

    def signal(self, number: signal.Signals) -> None:
        self.server.signal(number)

    def end(self) -> None:
        self.server.kill()

    def flip(self) -> int:
        names: Any = self.server.ask("KEYS", "*")
        for name in names:
            middle = str(chunk.HEADER_BYTES + 10)
            byte: Any = self.server.ask("GETRANGE", name, middle, middle)
            self.server.ask("SETRANGE", name, middle, bytes([byte[0] ^ 1]))
        return len(names)


class S3(Store):
    """moto, which takes any key and forgets everything with its process."""

    def __init__(self) -> None:
        self.server = s3_servers.Moto()
        self.server.start()
        self.url = s3_servers.bucket(self.server)
        self.bucket, self.port = self.url.removeprefix("s3://").partition("/")[0], self.server.port

    def up(self) -> None:
        self.server.start()
        s3_servers.boto(self.server.endpoint).create_bucket(Bucket=self.bucket)

    def down(self) -> None:
        self.server.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        self.server.signal(number)

    def end(self) -> None:
        self.server.stop()

    def flip(self) -> int:
        client = s3_servers.boto(self.server.endpoint)
        names = [each["Key"] for each in client.list_objects_v2(Bucket=self.bucket).get("Contents", ())]
        for name in names:
            data = bytearray(client.get_object(Bucket=self.bucket, Key=name)["Body"].read())
            data[(chunk.HEADER_BYTES + len(data)) // 2] ^= 1
            client.put_object(Bucket=self.bucket, Key=name, Body=bytes(data))
        return len(names)


class Scripted:
    """S3 as a test tells it to be: moto is never full, and takes any key."""

    def __init__(self) -> None:
        self.server = s3_servers.Scripted()
        self.url = f"s3://bucket/kv?endpoint={self.server.endpoint}"
        self.port = int(self.server.endpoint.rpartition(":")[2])

    def refuse(self, method: str, status: int = 200, code: str = "") -> None:
        """Answer so to each request of this method, "" for all; status 200: as usual."""
        refusal = s3_servers.Answer(status, code)
        self.server.script = lambda asked, _: refusal if status != 200 and method in ("", asked) else None

    def end(self) -> None:
        self.server.stop()


NAMES = ("lmkv", "valkey", "s3")
Ending = TypeVar("Ending", Cache, Valkey, S3, Scripted, Store)


@contextmanager
def running(name: str, folder: Path) -> Iterator[Store]:
    """A store of that name, empty; its process is gone afterwards. s3 wants a key in the environment."""
    store: Store = {"lmkv": Cache, "valkey": Valkey}[name](folder) if name != "s3" else S3()
    with ending(store):
        yield store


@contextmanager
def ending(store: Ending) -> Iterator[Ending]:
    try:
        yield store
    finally:
        store.end()


def tier(store: Store, **options: str) -> str:
    """Its URL with short patience and more options."""
    return with_options(store.url, **{"timeout": "2s", "lookup_timeout": "1s", **options})


def with_options(url: str, **options: str) -> str:
    """A tier's URL with more options."""
    query = "&".join(f"{key}={value}" for key, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{query}"
