"""The child of `engine.Engine`: opens vLLM engines and drives them as it is told over a socket.

One JSON object a line each way, on the file descriptor named by the only argument. A request is
``{"op": name, ...arguments}``; the answer is ``{"ok": true, ...}`` or ``{"ok": false, "error": text}``.
Several engines can be opened one after the other: the imports, a good part of a start, are paid once.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
import traceback
from typing import Any

import fp8_kernels
import prometheus_client
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


class MlaPrefixes:
    """While ``allowed``, vLLM leaves prefix caching on for MLA models on CPUs without AMX, where it turns it off.

    Its reference kernels do continue a prefix; without this there is no local hit to compare with.
    """

    allowed = False

    @classmethod
    def install(cls) -> None:
        """Wrap the one place in vLLM that decides it."""
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config.__func__

        def check_and_keep(platform: type, vllm_config: Any) -> None:
            cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
            before = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
            check(platform, vllm_config)
            if cls.allowed:
                cache.enable_prefix_caching, scheduler.enable_chunked_prefill = before

        CpuPlatform.check_and_update_config = classmethod(check_and_keep)


class Driver:
    """Each method is one op; at most one engine is open at a time."""

    def __init__(self) -> None:
        self.llm: Any = None

    def open(self, args: dict[str, Any], allow_mla_prefixes: bool) -> dict[str, Any]:
        MlaPrefixes.allowed = allow_mla_prefixes
        started = time.perf_counter()
        try:
            self.llm = LLM(**args)
        except Exception:
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()  # so that the next one can open
            raise
        config = self.llm.llm_engine.vllm_config
        return {
            "seconds": time.perf_counter() - started,
            "block_size": config.cache_config.block_size,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "prefix_caching": config.cache_config.enable_prefix_caching,
        }

    def generate(self, prompts: list[Any], sampling: dict[str, Any]) -> dict[str, Any]:
        inputs = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
        params = SamplingParams(**sampling)
        started = time.perf_counter()
        results = self.llm.generate(inputs, params, use_tqdm=False)
        return {"seconds": time.perf_counter() - started, "outputs": [plain(result) for result in results]}

    def reset(self, connector: bool) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache(reset_connector=connector)}

    def metrics(self) -> dict[str, Any]:
        """Every sample by name; `LLM.get_metrics` makes whole numbers of seconds."""
        samples = (sample for metric in prometheus_client.REGISTRY.collect() for sample in metric.samples)
        found = [each for each in samples if each.name.startswith("vllm:") and not each.name.endswith("_created")]
        return {"metrics": [{"name": each.name.removesuffix("_total"), "value": each.value} for each in found]}

    def close(self) -> dict[str, Any]:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()
        return {}


def plain(result: Any) -> dict[str, Any]:
    """What a test compares of one request's output."""
    output = result.outputs[0]
    steps = output.logprobs or []
    return {
        "tokens": list(output.token_ids),
        "logprobs": [sorted((token, found.logprob) for token, found in step.items()) for step in steps],
        "cached": result.num_cached_tokens,
        "finish": output.finish_reason,
    }


def serve(channel: socket.socket) -> None:
    driver = Driver()
    lines = channel.makefile("r", encoding="utf-8")
    for line in lines:
        request = json.loads(line)
        op = request.pop("op")
        try:
            answer = {"ok": True, **getattr(driver, op)(**request)}
        except Exception:
            answer = {"ok": False, "error": traceback.format_exc(limit=-5)}
        channel.sendall(json.dumps(answer).encode() + b"\n")
    driver.close()


if __name__ == "__main__":  # vLLM's own children import this file again
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    MlaPrefixes.install()
    if not torch.cpu._is_avx512_supported():
        fp8_kernels.install()
    serve(socket.socket(fileno=number))
