"""Every fault of a remote store, measured: how long requests took, how they ended, and when hits came back.

    python bench/remote_faults.py                       # nine faults of an lmkv server, Valkey and S3 (moto): a table
    python bench/remote_faults.py --fault stopped --store valkey

An engine has the store as its only tier, with a timeout of 2 s for everything and of 1 s for lookups. Under each fault
it retrieves a prompt three times from the store, looks it up, stores another prompt, and writes one container directly;
a client that knows nothing yet looks it up as well. The longest of these must end within half a second of its limit.
Then the fault ends, what the store has lost is stored again by another engine, and the same client retrieves until it
has the whole prompt. All bytes that it ever gets are compared. Exit 1 for a wrong byte, a late request, or hits that do
not return.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import remote_stores  # noqa: E402
import store_faults  # noqa: E402
from cache_servers import whole  # noqa: E402
from remote_engines import ALL, TOKENS, hit, open_engine  # noqa: E402
from s3_servers import keys_in_environment  # noqa: E402
from store_faults import Case, Fault  # noqa: E402

from lmkv import Engine, Retrieved  # noqa: E402
from lmkv.backends.base import Write  # noqa: E402
from lmkv.testing.backend_tests import key_of  # noqa: E402

TIMEOUT, LOOKUP = 2.0, 1.0
ROUNDS = 3
SLACK = 0.5
PATIENCE = 30.0
OTHER = TOKENS + 10_000


class Row(NamedTuple):
    """What is known of one fault of one store. seconds: the longest of each kind of call."""

    seconds: dict[str, float]
    outcomes: list[str]
    written: str
    counted: str
    back: str
    wrong: list[str]

    def __str__(self) -> str:
        longest = " · ".join(f"{self.seconds[kind]:.2f}" for kind in ("retrieve", "lookup", "write"))
        right = "wrong" if any(each.startswith("wrong bytes") for each in self.wrong) else "right"
        ends = f"{', then '.join(self.outcomes)} | {self.counted} | {self.written}"
        return f"{longest} | {ends} | {right} | {self.back}"


class Trial:
    """One fault of one store."""

    def __init__(self, case: Case) -> None:
        self.case, self.wrong = case, list[str]()
        self.seconds = dict.fromkeys(("retrieve", "lookup", "store", "write"), 0.0)
        self.engine: Engine

    def timed(self, kind: str, limit: float, call: Callable[[], object]) -> object:
        began = time.monotonic()
        result = call()
        took = time.monotonic() - began
        self.seconds[kind] = max(self.seconds[kind], took)
        if took > limit + SLACK:
            self.wrong.append(f"a {kind} took {took:.2f} s")
        return result

    def retrieve(self) -> Retrieved | None:
        """From the store alone; None: a byte was wrong."""
        self.engine.clear(tier="cpu")
        try:
            found = hit(self.case.memory, self.engine, self.case.right)
        except AssertionError as error:
            self.wrong.append(f"wrong bytes: {error}")
            return None
        return found

    def run(self, strike: Fault) -> Row:
        case = self.case
        if case.known:
            self.engine = open_engine(case.memory, case.url, TIMEOUT)
            assert self.engine.lookup(TOKENS).tokens == ALL
        with strike(case):
            if not case.known:
                self.engine = open_engine(case.memory, case.url, TIMEOUT)
            outcomes, written = self.requests()
        counts = {name[5:]: n for name, n in self.engine.stats().items() if name.startswith("miss.") and n}
        try:
            back = self.recovery()
        finally:
            self.timed("store", 10, self.engine.close)
        counted = ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"
        return Row(self.seconds, outcomes, written, counted, back, self.wrong)

    def requests(self) -> tuple[list[str], str]:
        """What is done while the fault is there."""
        engine, outcomes = self.engine, list[str]()
        writes = self.store() if self.case.full else ""
        for _ in range(ROUNDS):
            found = self.timed("retrieve", TIMEOUT, self.retrieve)
            text = "wrong bytes"
            if isinstance(found, Retrieved):
                text = "hit" if found.tokens == ALL else f"miss ({found.reason})"
                if 0 < found.tokens < ALL:
                    text = f"hit of {found.tokens} tokens ({found.reason})"
            if text not in outcomes:
                outcomes.append(text)
            self.timed("lookup", LOOKUP, lambda: engine.lookup(TOKENS))
        writes = writes or self.store()
        data = whole(1, 128 << 10)
        with open_engine(self.case.memory, self.case.url, TIMEOUT) as fresh:  # which has to ask
            self.timed("lookup", LOOKUP, lambda: fresh.lookup(TOKENS))
        self.timed("write", TIMEOUT, lambda: engine.storage.tiers[0].backend.write([Write(key_of(1), data)]))
        return outcomes, writes

    def store(self) -> str:
        """Another prompt; how its writes ended."""
        memory = self.case.memory
        memory.arrays[0][:] = 7
        self.engine.clear(tier="cpu")
        handle = self.timed("store", 0.5, lambda: self.engine.store(OTHER, memory.pages, memory.ids(ALL)))
        self.engine.flush(30)
        ends: Counter[str] = Counter()
        for outcomes in handle.tiers.values():  # type: ignore[attr-defined]
            ends.update(outcomes)
        return ", ".join(f"{n} {name}" for name, n in ends.items()) or "none"

    def recovery(self) -> str:
        """Until the whole prompt comes from the store again."""
        case, began = self.case, time.monotonic()
        if case.lost:
            case.refill()
            began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            if case.heals:  # what is damaged goes when it is read, and comes again from whoever computes it
                case.refill()
            found = self.retrieve()
            if found and found.tokens == ALL and list(found.tiers.values()) == [ALL]:
                return f"{time.monotonic() - began:.1f} s"
            time.sleep(0.05)
        self.wrong.append("hits did not come back")
        return "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", action="append", choices=store_faults.NAMES)
    parser.add_argument("--store", action="append", choices=remote_stores.NAMES)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    failed = False
    print(
        f"| fault | store | longest retrieve · lookup · write (limits {TIMEOUT:g} · {LOOKUP:g} · {TIMEOUT:g} s) ",
        end="",
    )
    print("| requests | misses counted | a store's writes | bytes | hits again after |")
    print("|---|---|---|---|---|---|---|---|")
    with pytest.MonkeyPatch.context() as patch:
        keys_in_environment(patch)
        for fault in options.fault or store_faults.NAMES:
            for name in options.store or remote_stores.NAMES:
                with tempfile.TemporaryDirectory(prefix="lmkv-") as folder:
                    options_ = {"timeout": f"{TIMEOUT:g}s", "lookup_timeout": f"{LOOKUP:g}s"}
                    with store_faults.opened(fault, name, Path(folder), **options_) as (case, strike):
                        row = Trial(case).run(strike)
                print(f"| {fault} | {name} | {row} |", flush=True)
                for each in row.wrong:
                    failed = True
                    print(f"WRONG: {each}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
