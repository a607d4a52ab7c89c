"""Tiers, one file each. `base` says what a backend is; `open` makes one from its URL.

Ours and other people's register alike: as entry points of the group "lmkv.backends".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast
from urllib.parse import parse_qsl

from lmkv.backends.base import Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.errors import ConfigError, nearest

__all__ = ["Backend", "Found", "Health", "Read", "Result", "Status", "Usage", "Write", "open"]


def open(url: str, **options: object) -> Backend:  # noqa: A001 - always written backends.open
    """The backend that ``url`` names: ``scheme://place?option=value&option=value``.

    The scheme is an entry point's name; what that loads is called as ``(url without query,
    **options)``, and its keyword-only parameters are the options there are. The query gives them as
    text, ``options`` as they are, and these win. ConfigError "tiers.url" for an unknown scheme or
    option; the backend raises its own for a value that it refuses.
    """
    place, _, query = url.partition("?")
    shown = re.sub(r"//[^/@]*@", "//***@", url)  # what is in there may be a secret
    scheme = place.partition(":")[0]
    points = {point.name: point for point in entry_points(group="lmkv.backends")}
    if scheme not in points:
        raise ConfigError("tiers.url", f"{shown!r}: no backend {scheme!r}{nearest(scheme, points)}")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        make = cast(Callable[..., Backend], points[scheme].load())
    except (ValueError, ImportError) as error:
        raise ConfigError("tiers.url", f"{shown!r}: {error}") from error
    given = {**dict(pairs), **options}
    known = inspect.signature(make).parameters.values()
    names = [each.name for each in known if each.kind is each.KEYWORD_ONLY]
    if not any(each.kind is each.VAR_KEYWORD for each in known):
        for name in sorted(given.keys() - set(names)):
            raise ConfigError("tiers.url", f"{shown!r}: no option {name!r}{nearest(name, names)}")
    if len(dict(pairs)) < len(pairs):
        raise ConfigError("tiers.url", f"{shown!r}: an option is given twice")
    return make(place, **given)
