"""What a part's raw bytes mean: dtype, layers, pages, heads, the order of their axes, and how K was rotated.

A `Meaning` is of one group of a spec; `Meanings` are those of all specs a storage has heard of, and make the `Shape` of
a part of a container.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmkv.chunk import bounds
from lmkv.errors import BadInput

if TYPE_CHECKING:
    from lmkv.chunk import Header, Part
    from lmkv.spec import KVSpec

FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
AXES = frozenset({"kv", "head", "token", "dim"})
LIMIT = 1 << 40  # bytes of a part, far above any: sizes multiply without surprises

Words = NDArray[Any]


@dataclass(frozen=True)
class Rope:
    """How K was rotated, by pairs of its first ``2 * len(inv_freq)`` channels; the rest was not.

    inv_freq: radians per token of each pair, any static scaling folded in. interleaved: pairs are (2i, 2i + 1), else
    (i, i + len(inv_freq)). factor: what cos and sin were multiplied by (YaRN's attention factor).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.inv_freq or not all(map(math.isfinite, (*self.inv_freq, self.factor))) or not self.factor:
            raise BadInput(f"a rope of {self.inv_freq} times {self.factor}")

    def like(self, other: Rope) -> bool:
        """The same but for rounding: frequencies are computed in many ways."""
        mine, theirs = ((*each.inv_freq, each.factor) for each in (self, other))
        same = len(mine) == len(theirs) and self.interleaved == other.interleaved
        return same and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Shape:
    """What the raw bytes of a part mean: ``layers`` times ``pages`` pages, each as ``axes`` say.

    axes: order of the axes in one page of one layer, outermost first: "kv head token dim", "token head kv dim", ...;
    without "kv" there is only K (``dim_v`` is 0); "" for packed pages, of which only the dtype is known. Where K and V
    differ in width, every axis inside of "kv" is laid out for each apart. first_layer: place in the group's list of
    layers. first_token: position of token 0, for ``rope`` (None: K is not rotated, or nobody knows how). page_mask:
    bit j, page j is present; absent ones are zero; 0 when all are there. of_layers: in the group's list; 0: not known.
    BadInput: sizes or axes that are none.
    """

    dtype: str
    layers: int
    pages: int
    page_tokens: int
    heads: int
    dim: int
    dim_v: int
    axes: str
    first_layer: int = 0
    first_token: int = 0
    rope: Rope | None = None
    page_mask: int = 0
    of_layers: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT_BYTES:
            raise BadInput(f"unknown dtype {self.dtype!r}; known: {', '.join(FLOAT_BYTES)}")
        if self.axes:
            check_axes(self.axes, self.dim, self.dim_v)
        sizes = self.layers, self.pages, self.page_tokens, *((self.heads, self.dim) if self.axes else ())
        if min(sizes) < 1 or min(self.dim_v, self.first_layer, self.first_token, self.page_mask, self.of_layers) < 0:
            raise BadInput(f"sizes must be at least 1: {self}")
        if math.prod(sizes) * (1 + self.dim_v) > LIMIT or self.page_mask >> self.pages:
            raise BadInput(f"sizes out of range: {self}")
        if self.rope and self.axes and 2 * len(self.rope.inv_freq) > self.dim:
            raise BadInput(f"a rope of {2 * len(self.rope.inv_freq)} channels for heads of {self.dim}")

    @property
    def width(self) -> int:
        """Bytes of one value."""
        return FLOAT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Raw bytes of the part; 0 where ``axes`` is ""."""
        page = self.page_tokens * self.heads * (self.dim + self.dim_v) * self.width
        return self.layers * self.pages * page if self.axes else 0


@dataclass(frozen=True)
class Meaning:
    """What the payload of one group of a spec means: the `Shape` of its parts, but for their place.

    layers: of the group. chunk_tokens: of the spec. 0: not known.
    """

    dtype: str
    heads: int
    dim: int
    dim_v: int
    axes: str = ""
    rope: Rope | None = None
    layers: int = 0
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.chunk_tokens) < 0:
            raise BadInput(f"sizes must not be negative: {self}")
        tokens = max(1, self.chunk_tokens)
        Shape(self.dtype, 1, 1, tokens, self.heads, self.dim, self.dim_v, self.axes, rope=self.rope)

    def parts(self) -> list[Shape]:
        """Shapes of the parts of a chunk in one page; none where its size or axes are not known."""
        if not (self.axes and self.layers and self.chunk_tokens):
            return []
        one = Shape(self.dtype, 1, 1, self.chunk_tokens, self.heads, self.dim, self.dim_v, self.axes, rope=self.rope)
        return [replace(one, layers=b - a, first_layer=a) for a, b in pairwise(bounds(self.layers, one.nbytes))]

    def of_part(self, header: Header, part: Part) -> Shape:
        """The shape of one part of a container of this group."""
        whole = header.page_mask == (1 << header.pages) - 1
        return Shape(
            self.dtype, part.layers, header.pages, header.page_tokens, self.heads, self.dim, self.dim_v, self.axes,
            part.first_layer, header.token_start, self.rope, 0 if whole else header.page_mask, self.layers,
        )  # fmt: skip


Known = Mapping[int, Sequence[Meaning | None]]  # by geometry id, for each group


class Meanings:
    """By geometry id and group, what the payload means. Added to under the storage's locks, read by anyone."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Meaning | None, ...]] = {}

    @classmethod
    def of(cls, meanings: Known) -> Meanings:
        """Those."""
        made = cls()
        made.add(meanings)
        return made

    def add(self, meanings: Known) -> None:
        """Learn of specs. Where one is known with other axes or another rope, only its dtypes are certain."""
        for geometry, groups in meanings.items():
            known = self._known.get(geometry, tuple(groups))
            self._known[geometry] = tuple(
                each if each == other else each and replace(each, axes="", rope=None)
                for each, other in zip(known, groups, strict=False)
            )

    def shape_of(self, header: Header, part: Part) -> Shape | None:
        """What a part's bytes are; None where nobody has said it."""
        groups = self._known.get(header.geometry, ())
        meaning = groups[header.key.group] if header.key.group < len(groups) else None
        return meaning.of_part(header, part) if meaning else None

    def __iter__(self) -> Iterator[Meaning]:
        return (each for groups in self._known.values() for each in groups if each)


def meanings(
    spec: KVSpec, axes: str | Sequence[str] = "", rope: Rope | Sequence[Rope | None] | None = None
) -> tuple[Meaning | None, ...]:
    """What the payload of each group of ``spec`` means; axes and rope for all groups, or one for each.

    None for a recurrent state, and for dtypes that are no floats. BadInput: axes that are none.
    """
    count = len(spec.groups)
    by_group = [axes] * count if isinstance(axes, str) else list(axes)
    ropes = [rope] * count if rope is None or isinstance(rope, Rope) else list(rope)
    found: list[Meaning | None] = []
    for group, order, turned in zip(spec.groups, by_group, ropes, strict=True):
        if group.state_bytes or group.dtype not in FLOAT_BYTES:
            found.append(None)
        else:
            order = "" if group.page_padding else order  # noqa: PLW2901
            sizes = group.kv_heads, group.head_dim, group.head_dim_v or 0
            found.append(Meaning(group.dtype, *sizes, order, turned, len(group.layers), spec.chunk_tokens))
    return tuple(found)


def check_axes(axes: str, dim: int, dim_v: int) -> None:
    """BadInput unless ``axes`` are "head token dim" in some order, with "kv" where there is a V; of two widths, "dim"
    comes after it."""
    words = axes.split(" ")
    if len(set(words)) != len(words) or set(words) != (AXES if dim_v else AXES - {"kv"}):
        raise BadInput(f"axes {axes!r} are not head, token, dim{' and kv' * bool(dim_v)} in some order")
    if dim_v not in (0, dim) and words.index("dim") < words.index("kv"):
        raise BadInput(f"axes {axes!r} cannot be of {dim} and {dim_v} channels")


def split(raw: Any, shape: Shape) -> tuple[Words, Words]:
    """K and V as views of ``raw``, in unsigned numbers of the dtype's width.

    K: [layers, pages, page_tokens, heads, dim], V: [..., dim_v]; writable where ``raw``, a buffer, is.
    BadInput: packed pages, or ``raw`` has not ``shape.nbytes`` bytes.
    """
    flat = np.frombuffer(raw, np.uint8)
    if not shape.axes or len(flat) != shape.nbytes:
        raise BadInput(f"{len(flat)} bytes are not {shape}")
    words = flat.view(f"<u{shape.width}")
    sizes = {"token": shape.page_tokens, "head": shape.heads}
    strides: list[dict[str, int]] = [{}, {}]
    inner, offset = [1, 1], 0
    for axis in reversed(shape.axes.split(" ")):
        if axis == "kv":
            offset, inner = inner[0], [sum(inner)] * 2
            continue
        for i, dim in enumerate((shape.dim, shape.dim_v)):
            strides[i][axis] = inner[i]
            inner[i] *= dim if axis == "dim" else sizes[axis]
    page = inner[0]
    views = []
    for begin, dim, by in ((0, shape.dim, strides[0]), (offset, shape.dim_v, strides[1])):
        box = (shape.layers, shape.pages, shape.page_tokens, shape.heads, dim)
        steps = (shape.pages * page, page, by["token"], by["head"], by["dim"])
        view = np.lib.stride_tricks.as_strided(
            words[begin if dim else 0 :], box, [step * shape.width for step in steps], writeable=words.flags.writeable
        )
        views.append(view)
    return views[0], views[1]
