"""lmkv for Hugging Face transformers: `CachedModel` wraps a model, its ``generate`` restores stored prefixes.

model.py: the one class; call.py, rows.py: reading a call and its batch; cache.py, buffers.py: cache layers in
preallocated memory; geometry.py, weights.py: what the model caches and what its weights are; report.py: what happened.
"""

from .model import CachedModel
from .report import Report, SequenceReport

__all__ = ["CachedModel", "Report", "SequenceReport"]
