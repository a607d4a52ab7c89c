"""Eviction policies: which leaf of the prefix tree a full tier gives up first.

A policy only ranks. The index offers leaves only (entries without a child in the same tier), skips what is pinned,
leased or being copied, and asks again when a rank has changed since it was noted. Third parties register theirs under
the entry point group ``lmkv.policies``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from lmkv.errors import ConfigError, nearest

if TYPE_CHECKING:
    from lmkv.index import Entry


class Policy(ABC):
    """Ranks entries: the lowest rank leaves first. A rank may rise at any time; it must fall only at a touch."""

    name: str

    @abstractmethod
    def rank(self, entry: Entry) -> float:
        """The entry's worth now, from its ``stamp`` (touch order), ``hits``, ``depth`` and sizes."""


class Lru(Policy):
    """Least recently touched first. Touches run from suffix to prefix, so a prefix outlives what builds on it."""

    name = "lru"

    def rank(self, entry: Entry) -> float:
        return entry.stamp


_BUILT_IN: dict[str, type[Policy]] = {"lru": Lru}


def policy(name: str) -> Policy:
    """The policy registered as ``name``. ConfigError names the nearest one when there is none."""
    known = {point.name: point for point in entry_points(group="lmkv.policies")}
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if name in known:
        found = known[name].load()()
        if not isinstance(found, Policy):
            raise ConfigError("policy", f"{name!r} is not an lmkv.eviction.Policy")
        return found
    raise ConfigError("policy", f"unknown policy {name!r}{nearest(name, {**_BUILT_IN, **known})}")
