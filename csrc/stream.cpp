#include "stream.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LMKV_TARGET(isa) __attribute__((target(isa)))
#endif

namespace lmkv {
namespace {

constexpr std::size_t kLine = 64;

// Copies lines [0, lines) of each of S streams that lie `apart` bytes apart; dst is line-aligned.
using Lines = void (*)(char* dst, const char* src, std::size_t lines, std::size_t apart);
using Rows = void (*)(char* dst, std::ptrdiff_t dst_stride, const char* src,
                      std::ptrdiff_t src_stride, std::size_t run, std::size_t count);

struct Variant {
    std::array<Lines, 3> lines;  // 1, 2 and 4 streams
    Rows rows;
};

#if defined(__x86_64__)

// One line a step and a stream: the hardware then sees S sequential readers.
#define LMKV_LINES(name, isa, copy_line)                                                        \
    template <std::size_t S>                                                                    \
    LMKV_TARGET(isa)                                                                            \
    void name##_lines(char* dst, const char* src, std::size_t lines, std::size_t apart) {       \
        for (std::size_t end = lines * kLine, at = 0; at < end; at += kLine)                    \
            for (std::size_t s = 0; s < S; ++s) copy_line(dst + s * apart + at, src + s * apart + at); \
    }                                                                                           \
    LMKV_TARGET(isa)                                                                            \
    void name##_rows(char* dst, std::ptrdiff_t dst_stride, const char* src,                     \
                     std::ptrdiff_t src_stride, std::size_t run, std::size_t count) {           \
        for (; count; --count, dst += dst_stride, src += src_stride)                            \
            for (std::size_t at = 0; at < run; at += kLine) copy_line(dst + at, src + at);      \
    }                                                                                           \
    constexpr Variant k_##name{{name##_lines<1>, name##_lines<2>, name##_lines<4>}, name##_rows};

LMKV_TARGET("avx2") inline void line_avx2(char* dst, const char* src) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
}

LMKV_TARGET("avx512f") inline void line_avx512(char* dst, const char* src) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

inline void line_sse2(char* dst, const char* src) {
    for (int i = 0; i < 64; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
}

LMKV_LINES(avx2, "avx2", line_avx2)
LMKV_LINES(avx512, "avx512f", line_avx512)
LMKV_LINES(portable, "sse2", line_sse2)

const Variant& variant() {
    switch (simd()) {
        case Simd::avx512: return k_avx512;
        case Simd::avx2: return k_avx2;
        default: return k_portable;
    }
}

#else

void plain_lines(char* dst, const char* src, std::size_t lines, std::size_t) {
    std::memcpy(dst, src, lines * kLine);
}

void plain_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride,
                std::size_t run, std::size_t count) {
    for (; count; --count, dst += dst_stride, src += src_stride) std::memcpy(dst, src, run);
}

constexpr Variant k_portable{{plain_lines, nullptr, nullptr}, plain_rows};

const Variant& variant() { return k_portable; }

#endif

// How many streams are fastest differs by a factor of three between CPUs, so the first large copies of
// the process try each in turn, on the caller's own data, and the best median stays.
class Chooser {
  public:
    static constexpr int kChoices = 3, kSamples = 9, kTickets = kChoices * kSamples;
    static constexpr std::size_t kSampleBytes = 32 * 1024;

    int chosen() const { return chosen_.load(std::memory_order_relaxed); }

    // Which choice the next copy should try; the ticket is handed back to record().
    int ticket() { return taken_.fetch_add(1, std::memory_order_relaxed); }

    void record(int ticket, float seconds_per_byte) {
        cost_[ticket % kChoices][ticket / kChoices].store(seconds_per_byte, std::memory_order_relaxed);
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == kTickets) decide();
    }

  private:
    void decide() {
        std::array<float, kChoices> medians;
        for (int c = 0; c < kChoices; ++c) {
            std::array<float, kSamples> sorted;
            for (int i = 0; i < kSamples; ++i) sorted[i] = cost_[c][i].load(std::memory_order_relaxed);
            std::nth_element(sorted.begin(), sorted.begin() + kSamples / 2, sorted.end());
            medians[c] = sorted[kSamples / 2];
        }
        chosen_.store(static_cast<int>(std::min_element(medians.begin(), medians.end()) - medians.begin()));
    }

    std::atomic<int> chosen_{-1}, taken_{0}, done_{0};
    std::atomic<float> cost_[kChoices][kSamples] = {};
};

Chooser chooser;

}  // namespace

void stream_copy(char* dst, const char* src, std::size_t n) {
    const std::size_t head = std::min(n, -reinterpret_cast<std::uintptr_t>(dst) % kLine);
    std::memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    const Variant& v = variant();
    int choice = 0, ticket = -1;
    if (n >= kSplitBytes && v.lines[1]) {
        choice = chooser.chosen();
        if (choice < 0) {
            ticket = n >= Chooser::kSampleBytes ? chooser.ticket() : Chooser::kTickets;
            choice = ticket < Chooser::kTickets ? ticket % Chooser::kChoices : 1;
        }
    }
    const std::size_t streams = std::size_t{1} << choice;
    const std::size_t lines = n / kLine / streams;
    if (ticket >= 0 && ticket < Chooser::kTickets) {
        const auto start = std::chrono::steady_clock::now();
        v.lines[choice](dst, src, lines, lines * kLine);
        const std::chrono::duration<float> took = std::chrono::steady_clock::now() - start;
        chooser.record(ticket, took.count() / static_cast<float>(n));
    } else {
        v.lines[choice](dst, src, lines, lines * kLine);
    }
    const std::size_t copied = lines * kLine * streams;
    std::memcpy(dst + copied, src + copied, n - copied);
}

void stream_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride,
                 std::size_t run, std::size_t count) {
    variant().rows(dst, dst_stride, src, src_stride, run, count);
}

void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

int stream_count() {
    const int choice = chooser.chosen();
    return choice < 0 ? 0 : 1 << choice;
}

void LineWriter::put(char* dst, const char* src, std::size_t n) {
    if (dst != dst_ + fill_ || !fill_) {
        flush();
        dst_ = dst;
        skew_ = reinterpret_cast<std::uintptr_t>(dst) % kLine;
    }
    while (n) {
        const std::size_t part = std::min(n, kCapacity - skew_ - fill_);
        std::memcpy(buffer_ + skew_ + fill_, src, part);
        fill_ += part, src += part, n -= part;
        if (skew_ + fill_ < kCapacity) return;
        char* next = dst_ + fill_;
        flush();
        dst_ = next, skew_ = 0;
    }
}

void LineWriter::flush() {
    if (!fill_) return;
    const std::size_t head = skew_ ? std::min(fill_, kLine - skew_) : 0;
    const std::size_t lines = (fill_ - head) / kLine, done = head + lines * kLine;
    std::memcpy(dst_, buffer_ + skew_, head);
    variant().lines[0](dst_ + head, buffer_ + skew_ + head, lines, 0);
    std::memcpy(dst_ + done, buffer_ + skew_ + done, fill_ - done);
    fill_ = 0;
}

}  // namespace lmkv
