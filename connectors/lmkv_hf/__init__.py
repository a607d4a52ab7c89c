"""lmkv for Hugging Face transformers: `CachedModel.generate` restores the prefixes it has seen.

model.py is the one class; call.py and rows.py read a call and its batch; cache.py and buffers.py
are cache layers in preallocated memory; geometry.py and weights.py find out what the model caches
and which weights it has; report.py says what happened.
"""

from .model import CachedModel, open_engine
from .report import Report, SequenceReport

__all__ = ["CachedModel", "Report", "SequenceReport", "open_engine"]
