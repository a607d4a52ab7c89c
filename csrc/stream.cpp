#include "stream.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmkv {
namespace {

constexpr std::size_t kStreams = 4;

struct Variant {
    // Four streams of `lines` lines each, `apart` bytes from one to the next; dst is line-aligned.
    void (*lines)(char* dst, const char* src, std::size_t lines, std::size_t apart);
    void (*rows)(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride, std::size_t run,
                 std::size_t count, const char* ahead);
};

void plain_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride, std::size_t run,
                std::size_t count, const char*) {
    for (; count; --count, dst += dst_stride, src += src_stride) std::memcpy(dst, src, run);
}

constexpr Variant variant_plain{nullptr, plain_rows};

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
#define LMKV_VARIANT(name, isa)                                                                                      \
    LMKV_TARGET(isa)                                                                                                 \
    void lines_##name(char* dst, const char* src, std::size_t lines, std::size_t apart) {                            \
        for (std::size_t at = 0; at < lines * kLineBytes; at += kLineBytes)                                          \
            for (std::size_t s = 0; s < kStreams; ++s) copy_line_##name(dst + s * apart + at, src + s * apart + at); \
    }                                                                                                                \
    LMKV_TARGET(isa)                                                                                                 \
    void rows_##name(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride,               \
                     std::size_t run, std::size_t count, const char* ahead) {                                        \
        const std::size_t late = run > kAheadBytes ? run / 2 : 0;                                                    \
        const bool jumps = late && src_stride != static_cast<std::ptrdiff_t>(run);                                   \
        for (; count; --count, dst += dst_stride, src += src_stride) {                                               \
            const char* const next = count == 1 ? ahead : jumps ? src + src_stride : nullptr;                        \
            for (std::size_t at = 0; at < run; at += kLineBytes) {                                                   \
                if (next && at - late < kAheadBytes) _mm_prefetch(next + at - late, _MM_HINT_T0);                    \
                copy_line_##name(dst + at, src + at);                                                                \
            }                                                                                                        \
        }                                                                                                            \
    }                                                                                                                \
    constexpr Variant variant_##name{lines_##name, rows_##name};

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

// The loads and stores of a moment lie at the same place of their 4 KiB pages if streams are whole pages apart; a load
// then waits for earlier stores that it merely resembles, and copies take up to six times as long, by how the two sides
// are aligned. Streams a quarter of a page apart, more or less, never meet.
constexpr std::size_t kQuarter = 1024 / kLineBytes;

void copy_lines(char* dst, const char* src, std::size_t n) {
    const std::size_t each = n / kLineBytes / kStreams;
    const std::size_t lines = (each - kQuarter) / (2 * kQuarter) * 2 * kQuarter + kQuarter;
    variant().lines(dst, src, lines, lines * kLineBytes);
    const std::size_t done = lines * kStreams * kLineBytes, whole = (n - done) / kLineBytes * kLineBytes;
    variant().rows(dst + done, 0, src + done, 0, whole, 1, nullptr);
    std::memcpy(dst + done + whole, src + done + whole, n - done - whole);
}

}  // namespace

void stream_copy(char* dst, const char* src, std::size_t n, const char* ahead) {
    const std::size_t head = std::min(n, -reinterpret_cast<std::uintptr_t>(dst) % kLineBytes);
    std::memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    if (n >= kSplitBytes && variant().lines) return copy_lines(dst, src, n);
    const std::size_t whole = n - n % kLineBytes;
    variant().rows(dst, 0, src, 0, whole, 1, ahead);
    std::memcpy(dst + whole, src + whole, n - whole);
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

}  // namespace lmkv
