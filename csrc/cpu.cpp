#include "cpu.h"

#include <sched.h>

#include <algorithm>
#include <atomic>

namespace lmkv {
namespace {

std::atomic<int> limit{static_cast<int>(Simd::avx512)};

Simd detected() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return Simd::avx512;
    if (__builtin_cpu_supports("avx2")) return Simd::avx2;
#endif
    return Simd::portable;
}

}  // namespace

Simd simd() {
    return std::min(detected(), static_cast<Simd>(limit.load(std::memory_order_relaxed)));
}

void limit_simd(Simd level) {
    limit.store(static_cast<int>(level), std::memory_order_relaxed);
}

const char* simd_name(Simd level) {
    switch (level) {
        case Simd::avx512:
            return "avx512";
        case Simd::avx2:
            return "avx2";
        default:
            return "portable";
    }
}

int usable_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    return std::max(1, CPU_COUNT(&set));
}

}  // namespace lmkv
