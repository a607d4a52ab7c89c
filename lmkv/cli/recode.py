"""``lmkv cache recode``: write what a disk tier holds in another codec, file by file."""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated

import typer

from lmkv import chunk, codec
from lmkv.cli.output import human, track
from lmkv.cli.store import Object, alone, scan
from lmkv.codec.base import ShapeOf
from lmkv.codec.shape import FLOAT_BYTES
from lmkv.errors import BadContainer, BadInput, ConfigError, nearest

Place = Annotated[str, typer.Argument(metavar="PATH_OR_URL", help="A disk tier's folder, or its URL.")]
SAID = {
    "recoded": "recoded",
    "already": "had the codec already",
    "not smaller": "not smaller in it, left as they are",
    "lossy": "lossy, left as they are",
    "bad": "bad or unreadable, left as they are",
}


def recode(
    place: Place,
    name: Annotated[str, typer.Option("--codec", metavar="NAME", help="raw, zstd, or with --dtype xpl, fp8, q8.")],
    level: Annotated[int | None, typer.Option(help="Of the codec.")] = None,
    profile: Annotated[str, typer.Option(metavar="ID", help="Of the codec.")] = "",
    dtype: Annotated[str, typer.Option(help="Of all that is cached, for codecs that must know it: bfloat16.")] = "",
) -> None:
    """Rewrite a disk tier in another codec, in place; no engine may use it meanwhile.

    May be stopped and started again: files that have the codec are passed over. What is lossy stays as it is.
    """
    to, shape_of = codec.get(name, level, profile), None
    if to.needs == "geometry":
        raise ConfigError("--codec", f"{name} must know how pages are laid out, which no file says: set it in the tier")
    if to.needs == "dtype":
        shape_of = _packed(name, dtype)
    counts, sizes = Counter[str](), [0, 0]
    with alone(place):
        for each in track(scan(place)[0], "recode"):
            outcome, nbytes = _recode(each, to, shape_of)
            counts[outcome] += 1
            sizes[0] += each.nbytes
            sizes[1] += nbytes
    for outcome, text in SAID.items():
        if counts[outcome] or outcome == "recoded":
            print(f"{counts[outcome]} {text}")
    print(f"{human(sizes[0])} before, {human(sizes[1])} now")


def _packed(name: str, dtype: str) -> ShapeOf:
    """What parts are when only their dtype is known. ConfigError: it is not."""
    if dtype not in FLOAT_BYTES:
        hint = f"unknown dtype {dtype!r}{nearest(dtype, FLOAT_BYTES)}" if dtype else f"is needed for {name}"
        raise ConfigError("--dtype", hint)
    return codec.Meaning(dtype, 0, 0, 0).of_part


def _recode(each: Object, to: codec.Codec, shape_of: ShapeOf | None) -> tuple[str, int]:
    """How one file ended, and its size then."""
    try:
        view = each.read()
        header = chunk.parse(view, each.key)
        chunk.verify(view, header)
        if (header.codec, header.level, header.profile) == (to.name, to.level, to.profile):
            return "already", each.nbytes
        if header.lossy:
            return "lossy", each.nbytes
        raw = memoryview(bytearray(header.raw_bytes))
        plain = codec.decode_container(view, header, raw)
        out = memoryview(bytearray(len(raw)))
        encoded = None if to.name == "raw" else codec.encode_container(raw, plain, to, out, shape_of)
    except (BadContainer, BadInput):
        return "bad", each.nbytes
    if encoded is None and to.name != "raw":
        return "not smaller", each.nbytes
    out, made = (raw, plain) if encoded is None else (out, encoded)
    made = chunk.seal(out, made)
    _publish(each, out[: made.total_bytes])
    return "recoded", made.total_bytes


def _publish(each: Object, data: memoryview) -> None:
    """Put ``data`` where the file is, whole or not at all, and as old as it was."""
    root = each.file[: each.file.rindex(f"/{each.key.scope.hex()}/")]
    partial = os.path.join(root, "tmp", f"{os.getpid()}-recode")  # what a dead writer leaves there goes by itself
    os.makedirs(os.path.dirname(partial), exist_ok=True)
    with open(partial, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.utime(partial, (each.created, each.created))
    os.replace(partial, each.file)
