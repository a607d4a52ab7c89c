"""What `lmkv bench` and the scripts in bench/ measure with: `case` is the engine's side, `measure` the references."""

from lmkv_bench.case import LAYOUTS, Bench, Memory, scratch
from lmkv_bench.measure import Memcpy, Runs, Step, beside_memcpy

__all__ = ["LAYOUTS", "Bench", "Memcpy", "Memory", "Runs", "Step", "beside_memcpy", "scratch"]
