"""lmkv: keep the KV cache of token prefixes in host memory, on disk and beyond, and give it back fast.

`Engine` is the way in; `KVSpec` says what a model caches, `PagedKV` where an inference engine keeps it. Importing
lmkv needs neither torch nor a GPU nor an inference engine.
"""

from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.errors import BackendError, BadContainer, BadInput, Closed, ConfigError, LmkvError, Unavailable
from lmkv.fingerprint import fingerprint
from lmkv.keys import ChunkKey, ChunkKeys, Identity, Scope
from lmkv.leases import Lease
from lmkv.pages import GroupView, PagedKV, Plane
from lmkv.plan import Plan
from lmkv.results import Explanation, FlushReport, Retrieved, StoreHandle
from lmkv.spec import Kind, KVSpec, LayerGroup

__version__ = "0.1.0"

__all__ = [
    "BackendError", "BadContainer", "BadInput", "ChunkKey", "ChunkKeys", "Closed", "Config", "ConfigError", "Engine",
    "Explanation", "FlushReport", "GroupView", "Identity", "KVSpec", "Kind", "LayerGroup", "Lease", "LmkvError",
    "PagedKV", "Plan", "Plane", "Retrieved", "Scope", "StoreHandle", "Unavailable", "fingerprint",
]  # fmt: skip
