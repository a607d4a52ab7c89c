"""vLLM with lmkv, offline: the same prompt cold, from vLLM's own prefix cache, and from lmkv.

    python examples/vllm_offline.py MODEL

Works on any vLLM 0.32; on a CPU set VLLM_CPU_KVCACHE_SPACE (GiB).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    """Three answers to one prompt; lmkv's tokens must be those of vLLM's own prefix hit."""
    llm = LLM(
        model,
        max_model_len=4096,
        kv_transfer_config={
            "kv_connector": "LMKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_budget": "1GiB"},
        },
    )
    manual = (Path(__file__).parent / "station_manual.txt").read_text()
    prompt = [{"role": "user", "content": f"{manual}\n\nWhat is the station built to answer?"}]

    def answer(what: str) -> str:
        started = time.perf_counter()
        (result,) = llm.chat(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        print(f"{what:<28} {time.perf_counter() - started:6.2f} s  {result.num_cached_tokens} tokens not computed")
        return result.outputs[0].text

    answer("cold")
    own = answer("vLLM's own prefix hit")
    llm.reset_prefix_cache()
    same = answer("lmkv, from host memory") == own
    print("same token" if same else "ANOTHER TOKEN")
    sys.exit(not same)


if __name__ == "__main__":
    main(sys.argv[1])
