"""What tests of lmkv and of other people's backends and codecs share. Needs pytest only where tests run."""

from lmkv.testing.backend_tests import BackendTests, container, key_of
from lmkv.testing.codec_tests import CodecTests
from lmkv.testing.faults import Fault, FaultyBackend, Gate

__all__ = ["BackendTests", "CodecTests", "Fault", "FaultyBackend", "Gate", "container", "key_of"]
