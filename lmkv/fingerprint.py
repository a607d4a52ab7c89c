"""A name for a model's weights, from the weights themselves.

Reading every byte of a large checkpoint takes minutes. The config, and each tensor's name, shape,
dtype and 64 KiB in pieces spread over it, take well under a second. A change that leaves every
sampled byte alone is not seen: give such weights a ``weights_id``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmkv import _native
from lmkv.errors import BadInput
from lmkv.keys import encode

if TYPE_CHECKING:
    from typing_extensions import Buffer

SAMPLE_BYTES = 64 * 1024
PIECES = 16
# Where a config came from and what wrote it; neither changes what the model computes.
NOT_THE_MODEL = {"_name_or_path", "transformers_version"}


def fingerprint(tensors: Iterable[tuple[str, tuple[int, ...], str, Buffer]], config: Mapping[str, Any] | str) -> str:
    """64 hex digits for a model, the same in whichever order its tensors come.

    tensors: (name, shape, dtype text, its bytes as a contiguous buffer). Only the sampled bytes are
    read, so memory-mapped checkpoints stay on disk. config: text, or a mapping of JSON values (key
    order, ``_name_or_path`` and ``transformers_version`` do not count). BadInput: no tensors, two
    of one name, a buffer that is not contiguous, a config that is not JSON.
    """
    digests: dict[str, bytes] = {}
    for name, shape, dtype, data in tensors:
        if name in digests:
            raise BadInput(f"two tensors are named {name!r}")
        dims = ",".join(str(int(size)) for size in shape)
        try:
            view = memoryview(data)
            sampled = sample(view.cast("B")) if view.nbytes else b""
        except (TypeError, ValueError) as error:
            raise BadInput(f"tensor {name!r} is not a contiguous buffer: {error}") from None
        text = encode(name, dims, dtype, str(view.nbytes), sampled)
        digests[name] = _native.blake3(text)
    if not digests:
        raise BadInput("no tensors to fingerprint: set weights_id instead")
    parts = [digests[name] for name in sorted(digests)]
    return _native.blake3(encode("lmkv weights v1", _config_text(config), *parts)).hex()


def sample(data: memoryview) -> bytes:
    """At most 64 KiB of a byte view: all of it, or 16 pieces of 4 KiB from its start to its end."""
    if data.nbytes <= SAMPLE_BYTES:
        return data.tobytes()
    piece = SAMPLE_BYTES // PIECES
    last = data.nbytes - piece
    starts = [last * i // (PIECES - 1) for i in range(PIECES)]
    return b"".join(data[start : start + piece] for start in starts)


def _config_text(config: Mapping[str, Any] | str) -> str:
    if isinstance(config, str):
        return config
    try:
        return json.dumps(_model_only(config), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the model config is not JSON: {error}") from None


def _model_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _model_only(v) for k, v in value.items() if k not in NOT_THE_MODEL}
    return value
