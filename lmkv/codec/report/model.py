"""A Llama- or Qwen-style transformers model: KV of a prefix, and what the model says next over given KV."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec.shape import Meaning, Rope
from lmkv.errors import BadInput, ConfigError
from lmkv.spec import Kind, KVSpec, LayerGroup

CHUNK_TOKENS = 256
AXES = "kv head token dim"  # of a page, as lmkv_hf stores it
Ids = NDArray[np.int64]
DTYPES = ("float32", "bfloat16", "float16")
PIECE = 1024  # tokens of a forward of the prefill


class KV(NamedTuple):
    """Keys [layers, heads, tokens, dim] and values [..., dim_v] as bfloat16 bits."""

    k: NDArray[np.uint16]
    v: NDArray[np.uint16]

    def part(self, tokens: slice) -> KV:
        """Views of some tokens."""
        return KV(self.k[:, :, tokens], self.v[:, :, tokens])

    def layer(self, index: int) -> KV:
        """Views of one layer, which stays an axis."""
        return KV(self.k[index : index + 1], self.v[index : index + 1])

    def crop(self, tokens: int) -> KV:
        """Views of the first tokens."""
        return self.part(slice(tokens))


class Geometry(NamedTuple):
    """How the model's KV is stored: one group of layers, chunks of one page."""

    spec: KVSpec
    meaning: Meaning


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bits."""
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite values rounded to bfloat16, to nearest even."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    words = (words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.asarray(words.astype(np.uint16))


class Model:
    """A model folder, loaded from disk only.

    dtype: of weights and arithmetic. work: a folder for the KV of prefixes, which are read back when the same model
    and tokens come again; nothing is written without it. ConfigError: no such folder, no torch or transformers;
    BadInput: a model whose layers do not all cache full attention alike.
    """

    def __init__(
        self, folder: str | Path, dtype: str = "float32", threads: int = 0, work: str | Path | None = None
    ) -> None:
        self.folder, self.work = Path(folder), Path(work) if work else None
        if not (self.folder / "config.json").is_file():
            raise ConfigError("MODEL", f"{folder} is no model folder: it has no config.json")
        if dtype not in DTYPES:
            raise ConfigError("--dtype", f"{dtype!r} is none of {', '.join(DTYPES)}")
        self._torch, transformers = _libraries()
        if threads:
            self._torch.set_num_threads(threads)
        self.dtype = getattr(self._torch, dtype)
        try:
            load = transformers.AutoModelForCausalLM.from_pretrained
            self.model = load(self.folder, dtype=self.dtype, local_files_only=True).eval()
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError("MODEL", f"{folder}: {' '.join(str(error).split())[:300]}") from None
        self.config = self.model.config.get_text_config(decoder=True)
        # the name of the cache argument changed during transformers 5
        names = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
        self._argument = "cache" if "cache" in names else "past_key_values"
        self._cache_class, self._layer_class = transformers.DynamicCache, transformers.cache_utils.DynamicLayer
        self.weight_bytes = 2 * sum(each.numel() for each in self.model.parameters())
        self.geometry = self._probe()
        self._name = self._fingerprint(dtype)

    @property
    def name(self) -> str:
        """The folder's, for tables."""
        return self.folder.resolve().name

    @property
    def max_tokens(self) -> int:
        """Positions the model was made for."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    def encode(self, text: str) -> Ids:
        """Token ids, without special ones."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, np.int64)

    def tensor(self, ids: Ids) -> Any:
        """Token ids as torch has them."""
        return self._torch.from_numpy(ids)

    def prefill(self, ids: Ids) -> KV:
        """KV of a prompt, rounded to bfloat16; of its first n tokens ``crop(n)`` is the KV, attention being causal."""
        file = self.work / f"{_name_of(self._name, ids)}.npz" if self.work else None
        if file and file.is_file():
            with np.load(file, allow_pickle=False) as saved:
                return KV(saved["k"], saved["v"])
        torch, cache = self._torch, self._new_cache()
        with torch.inference_mode():
            for at in range(0, len(ids), PIECE):
                piece = torch.from_numpy(ids[None, at : at + PIECE])
                self.model.base_model(input_ids=piece, use_cache=True, **{self._argument: cache})
            sides = [[self._bits(getattr(layer, side)) for layer in cache.layers] for side in ("keys", "values")]
        kv = KV(np.stack(sides[0]), np.stack(sides[1]))
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.npz")
            np.savez(partial, k=kv.k, v=kv.v)
            os.replace(partial, file)
        return kv

    def over(self, kv: KV) -> Prefix:
        """A prefix that the model can continue."""
        return Prefix(self, kv)

    def _new_cache(self) -> Any:
        return self._cache_class(config=self.config)

    def _bits(self, tensor: Any) -> NDArray[np.uint16]:
        rounded = tensor[0].to(self._torch.bfloat16).contiguous().view(self._torch.int16)
        words: NDArray[np.uint16] = rounded.numpy().view(np.uint16)
        return words

    def _probe(self) -> Geometry:
        cache = self._new_cache()
        with self._torch.inference_mode():
            tokens = self._torch.ones((1, 2), dtype=self._torch.long)
            self.model.base_model(input_ids=tokens, use_cache=True, **{self._argument: cache})
        plain = [each for each in cache.layers if type(each) is self._layer_class]
        shapes = {(*each.keys.shape[1:], each.values.shape[3]) for each in plain}
        if len(shapes) != 1 or len(plain) != len(cache.layers):
            raise BadInput("only models are measured whose layers all cache full attention with the same heads")
        heads, _, dim, dim_v = shapes.pop()
        layers = tuple(range(len(cache.layers)))
        group = LayerGroup(Kind.FULL, layers, CHUNK_TOKENS, heads, dim, dim_v)
        sizes = heads, dim, dim_v, AXES, rope_of(self.model), len(layers), CHUNK_TOKENS
        return Geometry(KVSpec((group,), CHUNK_TOKENS), Meaning("bfloat16", *sizes))

    def _fingerprint(self, dtype: str) -> str:
        files = sorted(path for path in self.folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
        lines = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return _native.blake3("\n".join([str(self.folder.resolve()), dtype, *lines]).encode()).hex()[:16]


class Prefix:
    """Decoded KV in the model's own cache, continued from as often as wanted."""

    def __init__(self, model: Model, kv: KV) -> None:
        self._model, self._torch = model, model._torch
        self._cache = model._new_cache()
        for index, pair in enumerate(zip(*kv, strict=True)):
            self._cache.update(*(self._tensor(side) for side in pair), index)

    def logits(self, ids: Sequence[int] | Ids) -> NDArray[np.float32]:
        """What the model expects after each of the tokens ``ids`` that follow the prefix: [tokens, vocabulary]."""
        model, torch = self._model, self._torch
        piece = torch.from_numpy(np.asarray(ids, np.int64)[None])
        with torch.inference_mode():
            output = model.model(input_ids=piece, use_cache=True, **{model._argument: self._cache})
            self._cache.crop(-piece.shape[1])
            found: NDArray[np.float32] = output.logits[0].float().numpy()
        return found

    def _tensor(self, words: NDArray[np.uint16]) -> Any:
        tensor = self._torch.from_numpy(np.ascontiguousarray(words).view(np.int16))
        return tensor.view(self._torch.bfloat16).to(self._model.dtype)[None]


def rope_of(model: Any) -> Rope | None:
    """How a transformers model rotates its keys; None: not at all, or in a way that is not known here."""
    found = [module for module in model.modules() if hasattr(module, "inv_freq")]
    if len(found) != 1 or getattr(found[0], "rope_type", "default") in ("dynamic", "longrope"):
        return None
    factor = float(getattr(found[0], "attention_scaling", 1.0))
    return Rope(tuple(map(float, found[0].inv_freq.double().tolist())), False, factor)


def _libraries() -> tuple[Any, Any]:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        torch, transformers, _ = map(importlib.import_module, ("torch", "transformers", "transformers.cache_utils"))
    except ImportError as error:
        raise ConfigError("MODEL", f"torch and transformers are needed, pip install 'lmkv[hf]': {error}") from None
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def _name_of(name: str, ids: Ids) -> str:
    return name + _native.blake3(np.ascontiguousarray(ids, "<i8").tobytes()).hex()[:16]
