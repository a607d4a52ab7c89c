"""Shared test settings."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A loaded machine is slow, not wrong: no example fails for the time it took.
settings.register_profile("lmkv", deadline=None)
settings.load_profile("lmkv")
