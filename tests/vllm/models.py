"""The models that lmkv is proven on, and how to open each on this CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import vllm_models
from engine import ROOT

SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"


@dataclass(frozen=True)
class Model:
    """name: the test's. checkpoint: of `tools/vllm_models.py`, or smollm2. args: for `Engine.open`.

    usual: in the default set.
    """

    name: str
    checkpoint: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    usual: bool = False

    def folder(self) -> Path:
        """The checkpoint, written first if need be."""
        if (self.checkpoint or self.name) == "smollm2":
            if not (SMOLLM2 / ".complete").exists():
                pytest.skip("no SmolLM2 here: tools/prepare_smollm2.py writes it")
            return SMOLLM2
        return vllm_models.write(self.checkpoint or self.name)


MLA = {"allow_mla_prefixes": True}
MODELS = (
    Model("smollm2", usual=True),
    Model("gemma3", usual=True),
    Model("lfm2", usual=True),
    Model("deepseek_v2", args=MLA, usual=True),
    Model("qwen3"),
    Model("qwen3_fp8", "qwen3", {"kv_cache_dtype": "fp8"}, usual=True),
    Model("mixtral"),
    Model("gpt_oss"),
    Model("deepseek_v3", args=MLA),
    Model("qwen3_next", args={"dtype": "bfloat16"}),  # the only type that vLLM's GDN takes on a CPU
)


def cases() -> list[Any]:
    """`MODELS` as pytest parameters; what is not in the default set carries the mark ``all``."""
    found = []
    for model in MODELS:
        marks = [] if model.usual else [pytest.mark.all]
        found.append(pytest.param(model, id=model.name, marks=marks))
    return found


def prompt(tokens: int = 900, seed: int = 1) -> list[int]:
    """Random token ids that every model here has; bytes, no special tokens."""
    return random.Random(seed).choices(range(256), k=tokens)
