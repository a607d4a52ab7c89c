"""Time to the first token of a long prompt in a real vLLM: computed, from its own prefix cache, and through connectors.

    .venv-vllm/bin/python bench/vllm_ttft.py [--rounds 7] [--tokens 2600] [--dtype bfloat16] [--disk URL_OPTIONS]

Two engines live at once, so that neighbours in a round share the machine's mood: one with lmkv, and one with vLLM's
ExampleConnector, whose files stay in the page cache. Both compute the same prompts first; then the one with lmkv and
its host service are started again, and the hits are measured in turn, each prompt from disk before from memory. A hit
is held against the next one of the same prompt in the same engine, which vLLM has in its own prefix cache by then (on a
CPU an engine without a connector computes on another number of cores). Before that, hits of another prompt have touched
all of vLLM's own blocks, as in an engine that has run for a while. A step starts when both engines are idle: a worker
of vLLM spins for most of a second after each step, which on two cores doubles what the other engine takes. CPU seconds
are those of all processes of an engine, and of the host service, until their work on the prompt is over.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

from engine import Engine, example_config  # noqa: E402
from service import service_pid, settled, stop_service  # noqa: E402

from lmkv.cli.output import emit, track  # noqa: E402

MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
COLD, HOST, DISK = "computed and stored, lmkv", "lmkv hit, host memory", "lmkv hit, disk after restart"
COLD_EXAMPLE, EXAMPLE = "computed and stored, ExampleConnector", "ExampleConnector hit, page cache"
WARM = 12  # loads of 2,600 tokens that go once through 1 GiB of vLLM's blocks
HITS = (HOST, DISK, EXAMPLE)
OWN = {step: f"  vLLM's own hit after {step}" for step in HITS}


def prompt(number: int, tokens: int) -> list[int]:
    """Random token ids, others for every number."""
    return random.Random(number).choices(range(100, 40_000), k=tokens)


def cpu_seconds(engine: Engine, socket: Path) -> float:
    """CPU time so far of the engine's processes and, where there is one, of the service on ``socket``."""
    processes = engine.processes()
    pid = service_pid(socket)
    with suppress(psutil.NoSuchProcess):
        processes += [psutil.Process(pid)] if pid else []
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class Bench:
    """The engines, and what each step took, run by run: (seconds to the first token, CPU seconds)."""

    def __init__(self, folder: Path, tokens: int, dtype: str, disk: str, stack: ExitStack) -> None:
        self.folder, self.tokens, self.socket = folder, tokens, folder / "socket"
        self.tier = f"disk://{folder / 'disk'}?budget=20GiB&{disk}".rstrip("&")
        self.runs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        stack.callback(stop_service, self.socket)
        self.lmkv, self.example = (
            stack.enter_context(Engine(folder / f"{name}.log", split=True, calm=False)) for name in ("lmkv", "example")
        )
        self.args: dict[str, Any] = {"max_model_len": tokens + 100, "max_num_batched_tokens": tokens + 100}
        self.args |= {"disable_log_stats": False, "dtype": dtype}
        self.hooks = 0.0
        self.open_lmkv()
        self.example.open(MODEL, transfer=example_config(folder / "example"), **self.args)
        for engine in (self.lmkv, self.example):
            engine.generate([prompt(10**6, tokens)], max_tokens=1)  # the first one pays for what is made lazily
        self.settle()

    def open_lmkv(self) -> None:
        """Start the engine with lmkv; the first time, and after `restart`, with an empty host memory."""
        extra = {"socket": str(self.socket), "cpu_budget": "2GiB", "tiers": [self.tier], "linger": 5}
        extra |= {"lookup_timeout": 10, "worth_it": False}  # a busy machine must not make a hit a miss
        self.lmkv.open(MODEL, connector=extra, **self.args)

    def restart(self) -> None:
        """The engine with lmkv and its service end and start again."""
        self.lmkv.close()
        stop_service(self.socket)
        self.open_lmkv()
        for engine in (self.lmkv, self.example):
            for _ in range(WARM):
                engine.generate([prompt(10**6, self.tokens)], max_tokens=1)
                engine.reset()
        self.settle()

    def settle(self) -> None:
        """lmkv's saves and writes are over."""
        settled(self.socket, 1)

    def cpu(self, engine: Engine) -> float:
        """CPU seconds so far of ``engine``, and of the service that belongs to it."""
        return cpu_seconds(engine, self.socket if engine is self.lmkv else Path("/nowhere"))

    def idle(self) -> None:
        """Return when neither engine has used a tenth of a core for a while."""
        used = -1.0
        while (now := self.cpu(self.lmkv) + self.cpu(self.example)) > used + 0.02:
            used = now
            time.sleep(0.2)

    def run(self, step: str, engine: Engine, ids: list[int], cached: int, after: Callable[[], object] | None) -> None:
        """Measure one step; SystemExit when it was not the hit, or not the miss, that it should be."""
        self.idle()
        before = self.cpu(engine)
        (output,), seconds = engine.timed([ids], max_tokens=1)
        if after:
            after()
        used = self.cpu(engine) - before
        if output.cached != cached:
            raise SystemExit(f"{engine.tail(3000)}\n{step}: {output.cached} tokens from a cache, not {cached}")
        self.runs[step].append((seconds, used))

    def hit(self, step: str, engine: Engine, ids: list[int], cached: int, after: Callable[[], object] | None) -> None:
        """A hit on what only the connector has, and vLLM's own right after it."""
        engine.reset()
        self.run(step, engine, ids, cached, after)
        self.run(OWN[step], engine, ids, cached, after)

    def __call__(self, rounds: int) -> list[dict[str, Any]]:
        """Rows of the table."""
        block = self.lmkv.info["block_size"]
        hit = (self.tokens - 1) // block * block
        before = self.lmkv.metrics().get("vllm:lmkv_hook_seconds", 0.0)
        for number in track(range(rounds), "computing"):
            ids = prompt(number, self.tokens)
            self.run(COLD, self.lmkv, ids, 0, self.settle)
            self.run(COLD_EXAMPLE, self.example, ids, 0, None)
        self.lmkv.generate([[1, 2, 3]], max_tokens=1)  # vLLM reports with the next step
        self.hooks = self.lmkv.metrics()["vllm:lmkv_hook_seconds"] - before
        self.restart()
        for number in track(range(rounds), "hits"):
            ids = prompt(number, self.tokens)
            self.hit(DISK, self.lmkv, ids, hit, self.settle)
            self.hit(EXAMPLE, self.example, ids, hit, None)
            self.hit(HOST, self.lmkv, ids, hit, self.settle)
        return [self.row(step) for step in (COLD, COLD_EXAMPLE, *(each for step in HITS for each in (step, OWN[step])))]

    def share(self) -> float:
        """Time in lmkv's hooks by the wall time of the prompts computed and stored."""
        return self.hooks / sum(seconds for seconds, _ in self.runs[COLD])

    def row(self, step: str) -> dict[str, Any]:
        seconds, cpu = zip(*self.runs[step], strict=True)
        more = [one - own for (one, _), (own, _) in zip(self.runs[step], self.runs[OWN.get(step, step)], strict=True)]
        return {
            "step": step,
            "runs": len(seconds),
            "ttft s": f"{statistics.median(seconds):.3f}",
            "min": f"{min(seconds):.3f}",
            "max": f"{max(seconds):.3f}",
            "over vLLM's own hit": f"{statistics.median(more):+.3f}" if step in OWN else "",
            "cpu s": f"{statistics.median(cpu):.2f}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2600, help="length of the prompts")
    parser.add_argument("--dtype", default="float32", help="bfloat16 halves the KV, and computes slowly without AMX")
    parser.add_argument("--disk", default="", help="of the disk tier: direct=off reads through the page cache")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (MODEL / "config.json").exists():
        raise SystemExit(f"no model in {MODEL}: tools/prepare_smollm2.py writes it")
    logging.getLogger("lmkv").setLevel(logging.ERROR)  # that the service keeps its own settings is what we want
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lmkv-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), options.tokens, options.dtype, options.disk, stack)
        rows = bench(options.rounds)
    emit(rows, options.json)
    print(f"lmkv's hooks took {bench.share():.4%} of the time of its computed prompts", file=sys.stderr)
    print(f"{time.perf_counter() - started:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
