"""Every exception lmkv raises.

    LmkvError
    ├── ConfigError     a setting is wrong: names the key and the fix; only ever raised at start
    ├── BadInput        a caller's argument is wrong (also a ValueError); nothing was changed
    ├── BadContainer    bytes that are not the chunk they claim to be; storage turns it into a miss
    ├── BackendError    a backend cannot be opened or listed
    ├── Closed          the engine was closed
    └── Unavailable     the host service does not answer, or not in time; the connector recomputes

On the hot path (lookup, retrieve, write-through) nothing below BadInput reaches the caller: a failure there is a
miss with a reason, counted in ``Engine.stats()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class LmkvError(Exception):
    """Base of all lmkv errors."""


class ConfigError(LmkvError):
    """A setting is wrong. ``key`` is its dotted name, the message says what would be right."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


class BadInput(LmkvError, ValueError):
    """An argument is wrong; the call changed nothing."""


class BadContainer(LmkvError):
    """Bytes that fail a check. ``reason`` is one word: checksum, identity, short, version, ..."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class BackendError(LmkvError):
    """A storage backend cannot be opened, or cannot be listed."""


class Closed(LmkvError):
    """The engine was closed before the call."""


class Unavailable(LmkvError):
    """The host service cannot be reached or did not answer in time; its text is the reason."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: what was meant, else all there is."""
    names = sorted(set(known))
    close = get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
