"""Whatever happens to the host service, its disk or a worker: every request is answered with the right tokens, the
engine lives on, and it hits again afterwards.

The right tokens are those of an engine without lmkv: for this model a hit and a cold run agree to the last bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import faulty
import psutil
import pytest
import vllm_models
from engine import Engine, EngineError, Output
from models import prompt
from service import service_pid, settled, stop_service, watching

from lmkv import chunk

TOKENS = 600
CHUNKS = 4  # of 128 tokens, the whole blocks before a prompt's last token
RESERVE_SECONDS = "2"  # how long a worker may take over a copy
AFTERWARDS = 120.0  # seconds within which it must hit again


class Answers:
    """Prompts, never the same twice, and what an engine without lmkv says to them."""

    def __init__(self, engine: Engine, folder: Path, count: int) -> None:
        self._prompts = [prompt(TOKENS, seed) for seed in range(100, 100 + count)]
        engine.open(folder)
        outputs = engine.generate(self._prompts, logprobs=None)
        self._right = {tuple(ids): each.tokens for ids, each in zip(self._prompts, outputs, strict=True)}
        assert len(set(self._right.values())) == count, "the prompts must be told apart by their answers"

    def fresh(self, count: int = 1) -> list[list[int]]:
        """Prompts that were not taken before."""
        taken, self._prompts = self._prompts[:count], self._prompts[count:]
        assert len(taken) == count, "make more prompts"
        return taken

    def check(self, prompts: list[list[int]], outputs: list[Output]) -> list[int]:
        """All as without lmkv. Returns how many tokens of each were cached."""
        for ids, each in zip(prompts, outputs, strict=True):
            assert each.finish == "length"
            assert each.tokens == self._right[tuple(ids)], f"other tokens with {each.cached} cached"
        return [each.cached for each in outputs]


class Bench:
    """An open engine with lmkv on a service of its own."""

    def __init__(self, engine: Engine, answers: Answers, gates: Path) -> None:
        self.engine, self.answers, self.gates = engine, answers, gates
        self.place = Path(tempfile.mkdtemp(prefix="lmkv-"))
        self.socket, self.disk = self.place / "socket", self.place / "disk"
        self._pool = ThreadPoolExecutor(1)

    def open(self, tier: str = "faulty://{disk}", **changes: Any) -> None:
        extra = {
            "socket": str(self.socket),
            "cpu_budget": "64MiB",
            "tiers": [tier.format(disk=self.disk)],
            "chunk_tokens": 128,
            "linger": 120,
            "lookup_timeout": 5,
            "load_timeout": 5,
            "worth_it": False,
            **changes,
        }
        self.engine.open(vllm_models.write("qwen3"), connector=extra, disable_log_stats=False)

    def ask(self, prompts: list[list[int]]) -> list[int]:
        """Cached tokens of each; the answers are right."""
        return self.answers.check(prompts, self.engine.generate(prompts, logprobs=None))

    def asking(self, prompts: list[list[int]]) -> Future[list[int]]:
        """`ask`, meanwhile."""
        return self._pool.submit(self.ask, prompts)

    def store(self, count: int = 1) -> list[list[int]]:
        """Fresh prompts that are stored in every tier, and that vLLM itself has forgotten."""
        prompts = self.answers.fresh(count)
        before = self.objects()
        self.ask(prompts)
        settled(self.socket, before + CHUNKS * count)
        assert self.engine.reset()
        return prompts

    def objects(self) -> int:
        with watching(self.socket) as host:
            return int(host.stats()["tiers"]["cpu"]["objects"])

    def hits_again(self, prompts: list[list[int]]) -> None:
        """Each of them, in the end; until then every answer is right."""
        deadline = time.monotonic() + AFTERWARDS
        while (cached := self.ask_anew(prompts)) != [128 * CHUNKS] * len(prompts):
            assert time.monotonic() < deadline, f"no hit again, {cached}\n{self.engine.tail()}"
            threading.Event().wait(0.1)  # for saves, or the service, to catch up

    def ask_anew(self, prompts: list[list[int]]) -> list[int]:
        """`ask` after vLLM itself has forgotten everything."""
        assert self.engine.reset()
        return self.ask(prompts)

    def lose_memory(self) -> None:
        """Stop the service and have the engine start another, which has the disk alone."""
        (other,) = self.store()
        assert stop_service(self.socket)
        self.hits_again([other])

    def close(self) -> None:
        self.engine.close()
        self._pool.shutdown()
        if pid := service_pid(self.socket):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        stop_service(self.socket)
        shutil.rmtree(self.place)


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="lmkv-"))
    yield folder / "gates"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    env = faulty.install(gates, **{faulty.RESERVE_SECONDS: RESERVE_SECONDS})
    with Engine(tmp_path_factory.mktemp("survival") / "vllm.log", env=env) as found:
        yield found


@pytest.fixture(scope="module")
def answers(engine: Engine) -> Answers:
    return Answers(engine, vllm_models.write("qwen3"), 160)


@pytest.fixture(scope="module")
def bench(engine: Engine, answers: Answers, gates: Path) -> Iterator[Bench]:
    """One engine and its service for all tests that leave both in order."""
    found = Bench(engine, answers, gates)
    found.open()
    yield found
    found.close()


@pytest.fixture
def own_bench(engine: Engine, answers: Answers, gates: Path) -> Iterator[Bench]:
    """Not yet open."""
    found = Bench(engine, answers, gates)
    yield found
    found.close()


def stop(pid: int) -> None:
    """SIGSTOP, until all its threads have stopped; there is no event for that."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Any, what: str, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        threading.Event().wait(0.05)


POINTS = ("fill", "write", "scatter", "read")
DEFAULT = {("fill", "killed"), ("read", "killed"), ("scatter", "stopped")}


@pytest.mark.parametrize(
    ("point", "how"),
    [
        pytest.param(point, how, marks=[] if (point, how) in DEFAULT else [pytest.mark.all])
        for how in ("killed", "stopped", "stopped, then killed")
        for point in POINTS
    ],
)
def test_service_lost_amid(bench: Bench, point: str, how: str) -> None:
    """fill, write: a save is under way, in the worker or to disk; scatter, read: a load, likewise."""
    loading = point in ("scatter", "read")
    (known,) = bench.store()
    if point == "read":
        bench.lose_memory()
    (new,) = bench.answers.fresh()
    pid = service_pid(bench.socket)
    assert pid is not None
    with faulty.Gate(bench.gates, point) as gate:
        answer = bench.asking([known] if loading else [new])
        gate.wait()
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            stop(pid)
    answer.result(120)
    bench.ask_anew([new, known, *bench.answers.fresh(2)])
    if how == "stopped":
        os.kill(pid, signal.SIGCONT)
    elif how == "stopped, then killed":
        os.kill(pid, signal.SIGKILL)
    bench.hits_again([new, known])
    assert (service_pid(bench.socket) == pid) == (how == "stopped")


def test_service_killed_at_any_time(bench: Bench) -> None:
    """Again and again, without a look at what it was doing."""
    prompts, luck = bench.answers.fresh(12), random.Random(3)
    for _ in range(4):
        answer = bench.asking(prompts)
        threading.Event().wait(luck.uniform(0.05, 0.6))  # anywhere in it
        if pid := service_pid(bench.socket):
            os.kill(pid, signal.SIGKILL)
        answer.result(120)
        assert bench.engine.reset()
        until(lambda: service_pid(bench.socket), "another service")
    bench.hits_again(prompts)


def test_worker_stopped_past_its_reservation_publishes_nothing(bench: Bench) -> None:
    """It stops amid a copy, with garbage in memory that looks whole; when it goes on its commit comes too late."""
    (ids,) = bench.answers.fresh()
    with watching(bench.socket) as host, faulty.Gate(bench.gates, "fill") as gate:
        before = host.stats()["tiers"]["cpu"]["objects"]
        answer = bench.asking([ids])
        gate.wait()
        worker = bench.engine.process.pid
        stop(worker)
        try:
            threading.Event().wait(1.5 * float(RESERVE_SECONDS))  # the reservations are over; nothing tells so
            assert host.stats()["tiers"]["cpu"]["objects"] == before
        finally:
            os.kill(worker, signal.SIGCONT)
    answer.result(120)
    assert bench.ask_anew([ids]) == [0]
    bench.hits_again([ids])


@pytest.mark.all
def test_worker_killed_amid_a_copy_publishes_nothing(bench: Bench, tmp_path: Path) -> None:
    env = {**faulty.install(tmp_path / "g"), faulty.GATES: str(bench.gates)}
    (ids,) = bench.answers.fresh()
    extra = {"socket": str(bench.socket), "chunk_tokens": 128, "lookup_timeout": 5, "worth_it": False, "spawn": False}
    before = bench.objects()
    with Engine(tmp_path / "vllm.log", env=env) as other:
        other.open(vllm_models.write("qwen3"), connector=extra)
        with faulty.Gate(bench.gates, "fill") as gate, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(other.generate, [ids])
            gate.wait()
            psutil.Process(other.process.pid).kill()
            with suppress(EngineError):
                answer.result(60)
    assert bench.objects() == before
    assert bench.ask_anew([ids]) == [0]
    bench.hits_again([ids])


def test_disk_folder_deleted_under_load(own_bench: Bench) -> None:
    bench = own_bench
    bench.open(f"disk://{bench.disk}")
    prompts = bench.store(8)
    bench.lose_memory()
    answer = bench.asking(prompts + bench.answers.fresh(8))
    shutil.rmtree(bench.disk)
    answer.result(120)
    bench.hits_again(prompts)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of 1 MiB."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_disk_full(own_bench: Bench) -> None:
    bench = own_bench
    with full_disk(bench.disk):
        bench.open(f"disk://{bench.disk}", cpu_budget="3MiB")
        prompts = bench.answers.fresh(16)
        for _ in range(2):
            bench.ask_anew(prompts)
        bench.hits_again(prompts[:1])
        bench.engine.close()
        stop_service(bench.socket)


def flip(folder: Path, share: float = 1.0) -> int:
    """Change one byte of the KV in every file, or in a share of them. Returns how many were changed."""
    luck, count = random.Random(1), 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(file.read_bytes())
        if data.startswith(chunk.MAGIC) and luck.random() < share:
            data[luck.randrange(chunk.HEADER_BYTES, len(data))] ^= 1 << luck.randrange(8)
            file.write_bytes(data)
            count += 1
    return count


def test_a_flipped_bit_on_disk_is_a_miss(own_bench: Bench) -> None:
    bench = own_bench
    bench.open(f"disk://{bench.disk}")
    prompts = bench.store(6)
    bench.lose_memory()
    assert flip(bench.disk, 0.5) >= 8
    assert sum(bench.ask_anew(prompts)) < 128 * CHUNKS * len(prompts)
    assert bench.engine.metrics()["vllm:lmkv_events"] > 0
    bench.hits_again(prompts)


def test_half_of_all_reads_fail(own_bench: Bench) -> None:
    bench = own_bench
    bench.open(f"faulty://{bench.disk}?failing=0.5")
    prompts = bench.store(8)
    assert stop_service(bench.socket)
    for _ in range(6):
        bench.ask_anew(prompts)
        stop_service(bench.socket)
    bench.hits_again(prompts)
