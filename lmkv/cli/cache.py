"""``lmkv cache``: what a disk tier holds, whether it is whole, and what can go; no engine needed."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import print_json

from lmkv.cli import recode
from lmkv.cli.output import Json, emit, human, track
from lmkv.cli.store import Object, alone, oldest, scan, useless
from lmkv.errors import BadContainer, ConfigError
from lmkv.units import parse_bytes

app = typer.Typer(no_args_is_help=True, help="What a disk tier holds: ls, du, show, verify, gc, recode.")
app.command()(recode.recode)

Place = recode.Place


def _describe(each: Object) -> dict[str, Any]:
    key, created = each.key, datetime.fromtimestamp(each.created).isoformat(" ", "seconds")
    row: dict[str, Any] = {"scope": key.scope.hex(), "digest": key.digest.hex(), "created": created}
    row |= {"depth": key.depth, "group": key.group, "shard": key.shard, "bytes": each.nbytes}
    try:
        header = each.header()
    except BadContainer as error:
        return row | {"start": None, "tokens": 0, "codec": f"bad: {error}"}
    return row | {"start": header.token_start, "tokens": header.token_count, "codec": header.codec}


@app.command()
def ls(
    place: Place, limit: Annotated[int, typer.Option(min=0, help="At most so many; 0: all.")] = 50, json: Json = False
) -> None:
    """Objects, newest first."""
    objects = sorted(scan(place)[0], key=lambda each: (-each.created, each.key))
    rows = [_describe(each) for each in objects[: limit or None]]
    short = [row | {"scope": row["scope"][:8], "digest": row["digest"][:16]} for row in rows]
    emit(rows if json else short, json)
    if len(rows) < len(objects) and not json:
        print(f"... and {len(objects) - limit} more (--limit 0 shows all)")


@app.command()
def du(place: Place, json: Json = False) -> None:
    """Objects, bytes and tokens of each scope."""
    scopes: dict[str, list[Object]] = defaultdict(list)
    for each in scan(place)[0]:
        scopes[each.key.scope.hex()].append(each)
    rows: list[dict[str, Any]] = []
    for scope, objects in scopes.items():
        # all chunks of a scope have the same length: the first good header tells it
        length = next(filter(None, (_describe(each)["tokens"] for each in objects)), 0)
        tokens = length * len({(each.key.tenant, each.key.digest) for each in objects})
        used = sum(each.nbytes for each in objects)
        rows.append({"scope": scope, "objects": len(objects), "bytes": used, "tokens": tokens})
    rows.sort(key=lambda row: -row["bytes"])
    total = {"scope": "all"} | {name: sum(row[name] for row in rows) for name in ("objects", "bytes", "tokens")}
    emit(rows if json else [*rows, total], json)


@app.command()
def show(place: Place, key: Annotated[str, typer.Argument(help="A key, or the beginning of a digest.")]) -> None:
    """Header and part table of one chunk, for each of its groups and shards, as JSON."""
    found = [each for each in scan(place)[0] if key == str(each.key) or each.key.digest.hex().startswith(key)]
    if len({each.key[:3] for each in found}) != 1:
        raise ConfigError(key, f"names {len(found)} objects, not one chunk")
    headers = []
    for each in found:
        header = each.header()
        fields = vars(header) | {"key": str(header.key), "page_mask": hex(header.page_mask)}
        headers.append(fields | {"parts": [part._asdict() for part in header.parts]})
    print_json(data=headers)


@app.command()
def verify(place: Place, delete: Annotated[bool, typer.Option("--delete", help="Remove what is bad.")] = False) -> None:
    """Read every object; check header, identity and checksums. Exit 1 when something is bad."""
    with alone(place) if delete else nullcontext():
        objects, strays = scan(place)
        faults = strays | {each.file: why for each in track(objects, "verify") if (why := each.fault())}
        bad = [file for file, why in faults.items() if why != "foreign"]
        for file in bad if delete else ():
            Path(file).unlink(missing_ok=True)
    for file, why in faults.items():
        print(f"{file}: {why}")
    count = len({each.file for each in objects}.union(bad))
    print(f"{count} objects, {len(bad)} bad, {len(bad) if delete else 0} removed")
    if bad:
        raise typer.Exit(1)


@app.command()
def gc(
    place: Place,
    budget: Annotated[
        int | None, typer.Option(parser=parse_bytes, metavar="SIZE", help="Evict down to this: 100GiB.")
    ] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Remove chunks whose prefix is gone.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove what has expired and what dead writers left; on request orphans, and the oldest."""
    doomed: dict[str, list[Object]] = {"expired": [], "orphans": [], "over budget": []}
    kept: list[Object] = []
    with nullcontext() if dry_run else alone(place):
        for each, why in useless(scan(place)[0]):
            (doomed[why] if why and (orphans or why != "orphans") else kept).append(each)
        if budget is not None:
            doomed["over budget"] = oldest(kept, budget)
        for what, objects in doomed.items():
            for each in () if dry_run else objects:
                Path(each.file).unlink(missing_ok=True)
            verb = "would free" if dry_run else "freed"
            print(f"{what}: {verb} {len(objects)} objects, {human(sum(each.nbytes for each in objects))}")
