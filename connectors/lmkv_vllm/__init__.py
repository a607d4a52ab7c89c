"""lmkv inside vLLM 0.32 (V1): one flag switches it on.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LMKVConnector", "kv_role": "kv_both"}'

Importing this package is cheap: vLLM is loaded when the connector class is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv_vllm.connector import LMKVConnector

__all__ = ["LMKVConnector", "register"]


def register() -> None:
    """The ``vllm.general_plugins`` entry point: make the connector known by its name. Any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "LMKVConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("LMKVConnector", "lmkv_vllm.connector", "LMKVConnector")


def __getattr__(name: str) -> Any:
    if name == "LMKVConnector":
        from lmkv_vllm.connector import LMKVConnector

        return LMKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
