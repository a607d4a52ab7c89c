#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <atomic>

namespace lmkv {
namespace {

std::atomic<Simd> limit{Simd::avx512};

Simd detected() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return Simd::avx512;
    if (__builtin_cpu_supports("avx2")) return Simd::avx2;
#endif
    return Simd::portable;
}

}  // namespace

Simd simd() { return std::min(detected(), limit.load(std::memory_order_relaxed)); }

void limit_simd(Simd level) { limit.store(level, std::memory_order_relaxed); }

const char* simd_name(Simd level) {
    return level == Simd::avx512 ? "avx512" : level == Simd::avx2 ? "avx2" : "portable";
}

int usable_cpus() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

}  // namespace lmkv
