// Which vector instructions this machine has. Every fast path is picked at run time, so that one
// wheel runs on any x86-64; other architectures take the portable code.
#pragma once

namespace lmkv {

enum class Simd : int { portable = 0, avx2 = 1, avx512 = 2 };

// The level in use: what the CPU and the kernel support, never above limit_simd().
Simd simd();

// Lowers (or raises again) the level in use; for tests, which run every variant on one machine.
void limit_simd(Simd level);

const char* simd_name(Simd level);

// CPUs this process may run on, at least 1.
int usable_cpus();

}  // namespace lmkv
