#include "stream.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmkv {
namespace {

struct Variant {
    // S streams of `lines` lines each, `apart` bytes from one to the next; dst is line-aligned.
    using Lines = void (*)(char* dst, const char* src, std::size_t lines, std::size_t apart);
    std::array<Lines, 3> lines;  // 1, 2 and 4 streams
    void (*rows)(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride, std::size_t run,
                 std::size_t count, const char* ahead);
};

void plain_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride, std::size_t run,
                std::size_t count, const char*) {
    for (; count; --count, dst += dst_stride, src += src_stride) std::memcpy(dst, src, run);
}

constexpr Variant variant_plain{{}, plain_rows};

#if defined(__x86_64__)

#define LMKV_TARGET(isa) __attribute__((target(isa)))

LMKV_TARGET("avx512f") inline void copy_line_avx512(char* dst, const char* src) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

LMKV_TARGET("avx2") inline void copy_line_avx2(char* dst, const char* src) {
    const auto* from = reinterpret_cast<const __m256i*>(src);
    const __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst) + 1, high);
}

// A macro, because a function of a higher instruction set cannot be inlined into a common template.
#define LMKV_VARIANT(name, isa)                                                                               \
    template <std::size_t S>                                                                                  \
    LMKV_TARGET(isa)                                                                                          \
    void lines_##name(char* dst, const char* src, std::size_t lines, std::size_t apart) {                     \
        for (std::size_t at = 0; at < lines * kLineBytes; at += kLineBytes)                                   \
            for (std::size_t s = 0; s < S; ++s) copy_line_##name(dst + s * apart + at, src + s * apart + at); \
    }                                                                                                         \
    LMKV_TARGET(isa)                                                                                          \
    void rows_##name(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride,        \
                     std::size_t run, std::size_t count, const char* ahead) {                                 \
        const std::size_t late = run > kAheadBytes ? run / 2 : 0;                                             \
        const bool jumps = late && src_stride != static_cast<std::ptrdiff_t>(run);                            \
        for (; count; --count, dst += dst_stride, src += src_stride) {                                        \
            const char* const next = count == 1 ? ahead : jumps ? src + src_stride : nullptr;                 \
            for (std::size_t at = 0; at < run; at += kLineBytes) {                                            \
                if (next && at - late < kAheadBytes) _mm_prefetch(next + at - late, _MM_HINT_T0);             \
                copy_line_##name(dst + at, src + at);                                                         \
            }                                                                                                 \
        }                                                                                                     \
    }                                                                                                         \
    constexpr Variant variant_##name{{lines_##name<1>, lines_##name<2>, lines_##name<4>}, rows_##name};

LMKV_VARIANT(avx512, "avx512f")
LMKV_VARIANT(avx2, "avx2")

#endif

const Variant& variant() {
#if defined(__x86_64__)
    if (simd() == Simd::avx512) return variant_avx512;
    if (simd() == Simd::avx2) return variant_avx2;
#endif
    return variant_plain;
}

// How many streams are fastest differs by a factor of three between CPUs. The first large copies of
// the process therefore try each number in turn, on the caller's own data, and the best median stays.
constexpr int kChoices = 3, kSamples = 21, kTickets = kChoices * kSamples;
constexpr int kUntilChosen = 1;  // two streams are at least good everywhere
std::atomic<int> chosen{-1}, tickets{0}, recorded{0};
std::atomic<float> cost[kChoices][kSamples];  // seconds a byte

void choose() {
    std::array<float, kChoices> medians;
    for (int c = 0; c < kChoices; ++c) {
        std::array<float, kSamples> samples;
        for (int i = 0; i < kSamples; ++i) samples[i] = cost[c][i].load(std::memory_order_relaxed);
        std::nth_element(samples.begin(), samples.begin() + kSamples / 2, samples.end());
        medians[c] = samples[kSamples / 2];
    }
    chosen.store(static_cast<int>(std::min_element(medians.begin(), medians.end()) - medians.begin()));
}

void copy_lines(char* dst, const char* src, std::size_t n, int choice) {
    const std::size_t streams = std::size_t{1} << choice, lines = n / kLineBytes / streams;
    variant().lines[choice](dst, src, lines, lines * kLineBytes);
    const std::size_t copied = lines * kLineBytes * streams;
    std::memcpy(dst + copied, src + copied, n - copied);
}

void measured_copy(char* dst, const char* src, std::size_t n) {
    const int ticket = tickets.load(std::memory_order_relaxed) < kTickets ? tickets.fetch_add(1) : kTickets;
    if (ticket >= kTickets) return copy_lines(dst, src, n, kUntilChosen);
    const auto start = std::chrono::steady_clock::now();
    copy_lines(dst, src, n, ticket % kChoices);
    const std::chrono::duration<float> took = std::chrono::steady_clock::now() - start;
    cost[ticket % kChoices][ticket / kChoices].store(took.count() / static_cast<float>(n), std::memory_order_relaxed);
    if (recorded.fetch_add(1) + 1 == kTickets) choose();
}

}  // namespace

void stream_copy(char* dst, const char* src, std::size_t n, const char* ahead) {
    const std::size_t head = std::min(n, -reinterpret_cast<std::uintptr_t>(dst) % kLineBytes);
    std::memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    const int choice = chosen.load(std::memory_order_relaxed);
    if (n < kSplitBytes || !variant().lines[kUntilChosen]) {
        const std::size_t whole = n - n % kLineBytes;
        variant().rows(dst, 0, src, 0, whole, 1, ahead);
        std::memcpy(dst + whole, src + whole, n - whole);
    } else if (choice < 0 && n >= 2 * kSplitBytes) {
        measured_copy(dst, src, n);
    } else {
        copy_lines(dst, src, n, choice < 0 ? kUntilChosen : choice);
    }
}

void stream_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride, std::size_t run,
                 std::size_t count, const char* ahead) {
    variant().rows(dst, dst_stride, src, src_stride, run, count, ahead);
}

void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

int stream_count() {
    const int choice = chosen.load(std::memory_order_relaxed);
    return choice < 0 ? 0 : 1 << choice;
}

}  // namespace lmkv
