"""vLLM's own end-to-end test of offloading to host memory, with lmkv in place of its OffloadingConnector.

    python upstream_offload.py MODEL SOCKET         # with vLLM's ``tests`` on the path

The test checks that hits are faster than computing, that events of stores reach a subscriber, and that the model goes
on counting after a hit. On a CPU its list of models is empty, so its function is called here, with shorter prompts.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest import mock

from engine import DTYPE
from tests.v1.kv_connector.unit import test_offloading_connector as upstream


def main(model: str, socket: str) -> None:
    extra = {"socket": socket, "cpu_budget": "512MiB", "chunk_tokens": 1, "linger": 5, "lookup_timeout": 10}

    def engine(**args: Any) -> upstream.LLM:
        ours = {"max_model_len": 1024, "block_size": 32, "dtype": DTYPE, "enforce_eager": True}
        return original(**{**args, **ours})

    def transfer(**args: Any) -> upstream.KVTransferConfig:
        return config(kv_connector="LMKVConnector", kv_role=args["kv_role"], kv_connector_extra_config=extra)

    original, config = upstream.LLM, upstream.KVTransferConfig
    greedy = partial(upstream.SamplingParams, temperature=0)  # the model is too small to count by chance
    with mock.patch.multiple(upstream, LLM=engine, KVTransferConfig=transfer, SamplingParams=greedy):
        upstream.test_cpu_offloading(model, None, None, False)


if __name__ == "__main__":
    main(*sys.argv[1:])
