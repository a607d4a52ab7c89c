"""Calls that must end in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SLACK = 0.5  # seconds beyond its limit that a call may take where nothing else runs; in proportion on a busier machine


def within(seconds: float, call: Callable[[], T], at_least: float = 0.0) -> T:
    """What ``call`` returns, having taken ``at_least`` and no more than ``seconds`` and the slack."""
    began = time.monotonic()
    result = call()
    took = time.monotonic() - began
    limit = seconds + SLACK * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert at_least <= took < limit, f"took {took:.2f} s, not {at_least:.2f} to {limit:.2f}"
    return result
