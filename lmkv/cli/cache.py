"""``lmkv cache``: what a tier holds, whether it is whole, and what can go; no engine needed."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import typer

from lmkv.backends.base import Found
from lmkv.cli.config import Json
from lmkv.cli.output import age, human, print_json, progress, table
from lmkv.cli.store import Store, Tree, opened
from lmkv.errors import BadContainer, ConfigError
from lmkv.keys import ChunkKey
from lmkv.units import Size

app = typer.Typer(no_args_is_help=True, help="What a tier holds: ls, du, show, verify, gc.")

Place = Annotated[str, typer.Argument(metavar="PATH_OR_URL", help="A folder, or a tier's URL.")]
Force = Annotated[bool, typer.Option("--force", help="Also while an engine uses the tier.")]


def _describe(store: Store, found: Found) -> dict[str, Any]:
    key = found.key
    row: dict[str, Any] = {"key": str(key), "scope": key.scope.hex(), "digest": key.digest.hex()}
    row |= {"depth": key.depth, "group": key.group, "shard": key.shard}
    row |= {"bytes": found.nbytes, "created": found.created}
    try:
        header = store.header(found)
    except BadContainer as error:
        return row | {"start": None, "tokens": 0, "codec": f"bad: {error}"}
    return row | {"start": header.token_start, "tokens": header.token_count, "codec": header.codec}


@app.command()
def ls(
    place: Place,
    scope: Annotated[str, typer.Option(help="Only scopes that begin with this.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="At most so many; 0: all.")] = 50,
    json: Json = False,
) -> None:
    """Objects, newest first."""
    with opened(place) as store:
        objects = [found for found in store.objects() if found.key.scope.hex().startswith(scope)]
        objects.sort(key=lambda found: (-found.created, found.key))
        rows = [_describe(store, found) for found in objects[: limit or None]]
    if json:
        print_json(rows)
        return
    columns = ("scope", "digest", "depth", "group", "shard", "start", "tokens", "bytes", "codec")
    cut = {"scope": 8, "digest": 16}
    table(
        (*columns, "age"),
        [(*(str(row[name])[: cut.get(name)] for name in columns), age(row["created"])) for row in rows],
    )
    if len(rows) < len(objects):
        print(f"... and {len(objects) - len(rows)} more (--limit 0 shows all)")


@app.command()
def du(place: Place, json: Json = False) -> None:
    """Objects, bytes and tokens of each scope."""
    scopes: dict[str, list[Found]] = defaultdict(list)
    rows: list[tuple[Any, ...]] = []
    with opened(place) as store:
        for found in store.objects():
            scopes[found.key.scope.hex()].append(found)
        for scope, objects in sorted(scopes.items(), key=lambda item: -len(item[1])):
            # all chunks of a scope have the same length: the first good header tells it
            lengths = (_describe(store, found)["tokens"] for found in objects)
            chunks = {(found.key.tenant, found.key.digest) for found in objects}
            tokens = len(chunks) * next(filter(None, lengths), 0)
            rows.append((scope, len(objects), sum(found.nbytes for found in objects), tokens))
    names = ("scope", "objects", "bytes", "tokens")
    if json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    objects, used, tokens = (sum(row[i] for row in rows) for i in (1, 2, 3))
    rows.append(("all", objects, used, tokens))
    table((*names, "size"), [(*row, human(row[2])) for row in rows])


@app.command()
def show(
    place: Place, key: Annotated[str, typer.Argument(help="A key, or the beginning of a digest.")], json: Json = False
) -> None:
    """Header and part table of one chunk, for each of its groups and shards."""
    with opened(place) as store:
        objects = [f for f in store.objects() if key == str(f.key) or f.key.digest.hex().startswith(key)]
        if len({found.key[:3] for found in objects}) != 1:
            raise ConfigError(key, f"names {len(objects)} objects, not one chunk")
        headers = {str(found.key): store.header(found) for found in objects}
    tables = {name: {**vars(header)} for name, header in headers.items()}
    for fields in tables.values():
        fields["key"], fields["page_mask"] = str(fields["key"]), hex(fields["page_mask"])
        fields["parts"] = [part._asdict() for part in fields["parts"]]
    if json:
        print_json(tables)
        return
    for fields in tables.values():
        parts = fields.pop("parts")
        table(("field", "value"), fields.items())
        print()
        table(tuple(parts[0]), [tuple(part.values()) for part in parts])


@app.command()
def verify(
    place: Place,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is bad.")] = False,
    force: Force = False,
) -> None:
    """Read every object; check header, identity and checksums. Exit 1 when something is bad."""
    bad: list[ChunkKey] = []
    with opened(place, changes=delete and not force) as store, progress() as bar:
        objects = store.objects()
        for found in bar.track(objects, description="verify"):
            if why := store.check(found):
                bad.append(found.key)
                print(f"{found.key}: {why}")
        strays = store.strays()
        for file, why in strays.items():
            print(f"{file}: {why}")
        broken = [file for file, why in strays.items() if why != "foreign"]
        removed = sum(store.backend.delete(bad)) + _unlink(broken) if delete else 0
    print(f"{len(objects) + len(broken)} objects, {len(bad) + len(broken)} bad, {removed} removed")
    if bad or broken:
        raise typer.Exit(1)


@app.command()
def gc(
    place: Place,
    budget: Annotated[str, typer.Option(help="Evict down to this size, leaves first.")] = "",
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Remove chunks whose prefix is gone: nothing hits them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    force: Force = False,
) -> None:
    """Remove what has expired and what dead writers left; on request orphans, and the oldest."""
    try:
        limit = Size.parse(budget) if budget else None
    except ValueError as error:
        raise ConfigError("--budget", f"{budget!r} {error}") from None
    with opened(place, changes=not force and not dry_run) as store:
        objects = store.objects()
        doomed = {"expired": [found for found in objects if _expired(store, found)]}
        left = _without(objects, doomed["expired"])
        if orphans:
            doomed["orphans"] = Tree(left).orphans()
            left = _without(left, doomed["orphans"])
        if limit:
            doomed["over budget"] = _over(left, limit, store.backend.usage().free or 0)
        verb = "would free" if dry_run else "freed"
        for what, found in doomed.items():
            gone = [True for _ in found]
            if not dry_run:
                gone = store.backend.delete([each.key for each in found])
            nbytes = sum(each.nbytes for each, ok in zip(found, gone, strict=True) if ok)
            print(f"{what}: {verb} {sum(gone)} objects, {human(nbytes)}")
        stale = store.stale()
        print(f"left by dead writers: {verb} {len(stale) if dry_run else _unlink(stale)} files")


def _expired(store: Store, found: Found) -> bool:
    with suppress(BadContainer):
        return 0 < store.header(found).expires <= time.time()
    return False


def _without(objects: Iterable[Found], gone: Iterable[Found]) -> list[Found]:
    keys = {found.key for found in gone}
    return [found for found in objects if found.key not in keys]


def _over(objects: list[Found], limit: Size, free: int) -> list[Found]:
    """The oldest leaves that must go until the rest fits into ``limit``."""
    used = sum(found.nbytes for found in objects)
    target, gone = limit.resolve(used + free), []
    for parts in Tree(objects).oldest_leaves():
        if used <= target:
            break
        gone += parts
        used -= sum(found.nbytes for found in parts)
    return gone


def _unlink(files: Iterable[str]) -> int:
    gone = 0
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(file)
            gone += 1
    return gone
