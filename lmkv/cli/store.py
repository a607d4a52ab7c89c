"""A disk tier at rest, read as the files that it is: nothing is opened, so nothing is cleaned up meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple
from urllib.parse import quote, unquote

from lmkv import _native, backends, chunk
from lmkv.cli.output import track
from lmkv.errors import BadContainer, BadInput, ConfigError
from lmkv.eviction import Lru
from lmkv.index import Index
from lmkv.keys import ChunkKey


class Object(NamedTuple):
    """One file where a container belongs."""

    file: str
    key: ChunkKey
    nbytes: int
    created: float  # unix seconds

    def header(self) -> chunk.Header:
        """Its header, whoever's it is. BadContainer when there is none."""
        return chunk.parse(self.read(chunk.HEADER_BYTES))

    def expired(self) -> bool:
        """Its time is over."""
        with suppress(BadContainer):
            return 0 < self.header().expires <= time.time()
        return False

    def fault(self) -> str:
        """Why it is bad, empty when it is not: all of it is read, header, identity and checksums are checked."""
        try:
            view = self.read()
            chunk.verify(view, chunk.parse(view, self.key))
        except BadContainer as error:
            return "" if error.reason == "missing" else str(error)  # evicted since it was listed
        return ""

    def read(self, nbytes: int = -1) -> memoryview:
        """Its bytes, or the first of them. BadContainer: missing, unreadable."""
        try:
            with open(self.file, "rb") as stream:
                return memoryview(stream.read(nbytes))
        except OSError as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
            raise BadContainer(reason, str(error.strerror)) from None


def roots(place: str) -> list[str]:
    """Folders of the tier at a path or URL. ConfigError: there is none."""
    url = place if place.startswith("disk://") else f"disk://{quote(os.path.abspath(place))}"
    found = [os.path.normpath(unquote(path)) for path in url[len("disk://") :].partition("?")[0].split(",")]
    if not all(os.path.exists(f"{root}/lock") for root in found):
        raise ConfigError(place, "is no disk tier (a folder with a file `lock` in it)")
    return found


@contextmanager
def alone(place: str) -> Iterator[None]:
    """Hold a tier's lock, which also removes what dead writers left. ConfigError where somebody else has it."""
    with closing(backends.open("disk://" + ",".join(map(quote, roots(place))))) as backend:
        if backend.shared:
            raise ConfigError(place, "an engine is using it: stop that first; or it cannot be written")
        yield


def scan(place: str) -> tuple[list[Object], dict[str, str]]:
    """A tier's objects; and files that can be none, with the reason: foreign, misplaced or short."""
    objects, strays = [], {}
    for root in roots(place):
        for folder, _, _ in track(os.walk(root), "list"):
            files = []
            with suppress(FileNotFoundError):  # pruned meanwhile
                files = _native.list_dir(folder)
            for name, nbytes, written in files:
                file = f"{folder}/{name}"
                where = file[len(root) + 1 :]
                if where == "lock" or where.startswith("tmp/"):
                    continue
                try:
                    key = ChunkKey.parse(f"{where.partition('/')[0]}-{name}")
                except BadInput:
                    strays[file] = "foreign"
                    continue
                digest = key.digest.hex()
                if where != f"{key.scope.hex()}/{digest[:2]}/{digest[2]}/{name}":
                    strays[file] = "misplaced"
                elif nbytes % chunk.PAGE or not nbytes:
                    strays[file] = "short"
                else:
                    objects.append(Object(file, key, nbytes, written / 1e9))
    return objects, strays


def useless(objects: Sequence[Object]) -> Iterator[tuple[Object, str]]:
    """Every object, prefix first, and why it serves nobody: expired, orphans (no unbroken prefix), or empty."""
    linked = set()
    for each in track(sorted(objects, key=lambda each: each.key.depth), "headers"):
        scope, tenant, digest, parent, depth, *_ = each.key
        if each.expired():
            yield each, "expired"
        elif depth and (scope, tenant, parent) not in linked:
            yield each, "orphans"
        else:
            linked.add((scope, tenant, digest[:8]))
            yield each, ""


def oldest(objects: Sequence[Object], budget: int) -> list[Object]:
    """What must go until the rest fits into ``budget`` bytes, in the order of the engine's own eviction."""
    index, gone, by_key = Index(1, Lru()), [], {each.key: each for each in objects}
    for each in objects:
        index.add(each.key, 0, each.nbytes, created=max(1, int(each.created)))
    for entry in index.victims(0, lambda _: False):
        if index.used[0] <= budget:
            break
        gone += [by_key[key] for key in entry.keys(0)]
        index.remove(entry, 0)
    return gone
