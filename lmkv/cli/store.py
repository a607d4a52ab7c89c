"""A tier at rest: its objects, their headers, what should not be there, and the prefix trees.

A disk tier's lock is held meanwhile, unless an engine has it: nobody else cleans up under us, and
our own backend, seeing it taken, leaves everything as it is.
"""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from lmkv import backends, chunk
from lmkv.backends.base import Found, Read, Status
from lmkv.errors import BadContainer, BadInput, ConfigError
from lmkv.keys import ChunkKey

PAGE = 4096
STALE = 3600.0
Node = tuple[bytes, bytes, bytes]  # scope, tenant, first 8 bytes of the digest


class Store:
    """A tier opened for inspection. ``roots``: its folders when it is a disk, else empty."""

    def __init__(self, url: str, roots: Sequence[str]) -> None:
        self.backend, self.roots = backends.open(url), roots
        self._buffer = mmap.mmap(-1, PAGE)

    def objects(self) -> list[Found]:
        """Everything that the tier lists."""
        return [found for batch in self.backend.scan() for found in batch]

    def header(self, found: Found) -> chunk.Header:
        """The header, of a disk tier without reading the rest. BadContainer when there is none."""
        for file in (f"{root}/{_place(found.key)}" for root in self.roots):
            with suppress(FileNotFoundError), open(file, "rb") as stream:
                return chunk.parse(memoryview(stream.read(PAGE)))
        return chunk.parse(self.read(found)[:PAGE])

    def read(self, found: Found) -> memoryview:
        """The whole container, valid until the next read. BadContainer when it cannot be had."""
        if len(self._buffer) < found.nbytes:
            self._buffer = mmap.mmap(-1, found.nbytes)
        view = memoryview(self._buffer)[: found.nbytes]
        (result,) = self.backend.read([Read(found.key, view)])
        if result.status is not Status.OK:
            raise BadContainer(result.status.value, result.detail)
        return view[: result.nbytes]

    def check(self, found: Found) -> str:
        """Why an object is bad: it is read, its header, identity and checksums are checked."""
        try:
            view = self.read(found)
            chunk.verify(view, chunk.parse(view[:PAGE]), found.key)
        except BadContainer as error:
            gone = error.reason == Status.MISSING.value  # since it was listed
            return "" if gone else str(error)
        return ""

    def strays(self) -> dict[str, str]:
        """Files of a disk tier that can be no objects: short, misplaced, or foreign."""
        found: dict[str, str] = {}
        for root in self.roots:
            for folder, below, names in os.walk(root):
                if folder == root:
                    below[:] = [name for name in below if name != "tmp"]
                    names.remove("lock")
                for file in (f"{folder}/{name}" for name in names):
                    with suppress(FileNotFoundError):
                        if why := _stray(file, file[len(root) + 1 :]):
                            found[file] = why
        return found

    def stale(self) -> list[str]:
        """Temporary files whose writer is gone, or can no longer be at it."""
        files = []
        for file in (file for root in self.roots for file in Path(root, "tmp").glob("*")):
            with suppress(FileNotFoundError):
                late = time.time() - file.stat().st_mtime > STALE
                if late or not Path("/proc", file.name.partition("-")[0]).exists():
                    files.append(str(file))
        return files


def _place(key: ChunkKey) -> str:
    """Where below its root a disk tier has the object."""
    text, digest = str(key), key.digest.hex()
    return f"{text[:32]}/{digest[:2]}/{digest[2]}/{text[33:]}"


def _stray(file: str, place: str) -> str:
    try:
        key = ChunkKey.parse(f"{place.partition('/')[0]}-{os.path.basename(place)}")
    except BadInput:
        return "foreign"
    nbytes = os.path.getsize(file)
    return "misplaced" if _place(key) != place else "short" if nbytes % PAGE or not nbytes else ""


@contextmanager
def opened(place: str, changes: bool = False) -> Iterator[Store]:
    """The tier at a path or URL, which must exist; with ``changes`` no engine may be using it."""
    url = place if "://" in place else "disk://" + quote(os.path.abspath(place))
    roots: list[str] = []
    if url.startswith("disk://"):
        paths = url[len("disk://") :].partition("?")[0].split(",")
        roots = [os.path.normpath(unquote(path)) for path in paths]
    with ExitStack() as stack:
        for root in roots:
            lock = Path(root, "lock")
            if not lock.exists():
                raise ConfigError(place, "is no disk tier (a folder with a file `lock` in it)")
            with suppress(PermissionError):
                file = stack.enter_context(lock.open("r+"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if changes:
                        reason = "an engine is using it: stop that first, or say --force"
                        raise ConfigError(place, reason) from None
        store = Store(url, roots)
        stack.callback(store.backend.close)
        yield store


class Tree:
    """Objects as prefix trees: a node is a chunk with its parts of all groups and shards."""

    def __init__(self, objects: Sequence[Found]) -> None:
        self.nodes: dict[Node, list[Found]] = defaultdict(list)
        for found in objects:
            self.nodes[found.key.scope, found.key.tenant, found.key.digest[:8]].append(found)

    def _parent(self, node: Node) -> Node:
        return (*node[:2], self.nodes[node][0].key.parent)

    def orphans(self) -> list[Found]:
        """Chunks without an unbroken way from the first one of their prompt: nothing hits them."""
        linked: set[Node] = set()
        for node in sorted(self.nodes, key=lambda node: self.nodes[node][0].key.depth):
            if self.nodes[node][0].key.depth == 0 or self._parent(node) in linked:
                linked.add(node)
        return [found for node, parts in self.nodes.items() if node not in linked for found in parts]

    def oldest_leaves(self) -> Iterator[list[Found]]:
        """Every node's parts: leaves first, of those the oldest; a node follows its last child."""
        created = {node: max(part.created for part in parts) for node, parts in self.nodes.items()}
        children = Counter(map(self._parent, self.nodes))
        leaves = [(when, node) for node, when in created.items() if not children[node]]
        heapq.heapify(leaves)
        while leaves:
            _, node = heapq.heappop(leaves)
            yield self.nodes[node]
            parent = self._parent(node)
            children[parent] -= 1
            if parent in created and not children[parent]:
                heapq.heappush(leaves, (created[parent], parent))
