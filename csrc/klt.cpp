// The inverse transform. Most coefficients are zero, so each token has a list of those that are not, in pairs; pairs
// meet their rows of the matrix in 64 sums, 32 bits each, that a vector unit keeps in registers.
#include "klt.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "clones.h"
#include "cpu.h"
#include "klt_core.h"

namespace lmkv {
namespace {

constexpr std::size_t kPairBytes = 2 * kKltSlab * sizeof(std::int16_t);

std::size_t up(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

// What a thread keeps between calls.
struct Scratch {
    std::vector<std::uint32_t> offsets, values, counts, sizes;
    std::vector<std::int32_t> sums;
};

std::uint32_t pair_of(const std::int16_t* q, std::size_t step, bool second) {
    return static_cast<std::uint16_t>(q[0]) |
           static_cast<std::uint32_t>(second ? static_cast<std::uint16_t>(q[step]) : 0) << 16;
}

std::uint32_t sizes_of(std::uint32_t pair) {
    return static_cast<std::uint32_t>(std::abs(static_cast<std::int16_t>(pair)) +
                                      std::abs(static_cast<std::int16_t>(pair >> 16)));
}

// The list of one chunk and one token.
void list_plainly(const std::int16_t* q, std::size_t step, std::size_t rows, const KltEntries& entries,
                  std::uint32_t* size) {
    std::uint32_t n = 0;
    for (std::size_t k = 0; k < rows; k += 2, q += 2 * step) {
        const std::uint32_t pair = pair_of(q, step, k + 1 < rows);
        if (!pair) continue;
        entries.offsets[n] = static_cast<std::uint32_t>(k / 2 * kPairBytes);
        entries.values[n++] = pair;
        *size += sizes_of(pair);
    }
    *entries.counts = n;
}

LMKV_CLONES void finish(const std::int32_t* __restrict sums, std::size_t tokens, const float* __restrict scale,
                        const float* __restrict mean, std::size_t n, float* __restrict x, std::size_t step) {
    for (std::size_t t = 0; t < tokens; ++t, sums += kKltSlab, x += step)
        for (std::size_t c = 0; c < n; ++c) {
            const float product = static_cast<float>(sums[c]) * scale[c];
            x[c] = product + mean[c];
        }
}

// One token's sums, for coefficients so large that 32 bits do not hold them.
void finish_wide(const std::int16_t* numbers, const KltEntries& entries, std::size_t chunks, std::size_t tokens,
                 const float* scale, const float* mean, std::size_t n, float* x) {
    std::int64_t sums[kKltSlab] = {};
    for (std::size_t chunk = 0; chunk < chunks; ++chunk, numbers += 2 * kKltSlab * kKltChunk) {
        const KltEntries mine = at(entries, chunk * tokens);
        for (std::size_t i = 0; i < *mine.counts; ++i) {
            const std::int64_t one = static_cast<std::int16_t>(mine.values[i]);
            const std::int64_t two = static_cast<std::int16_t>(mine.values[i] >> 16);
            const std::int16_t* const pair = numbers + mine.offsets[i] / sizeof *numbers;
            for (std::size_t c = 0; c < kKltSlab; ++c) sums[c] += one * pair[2 * c] + two * pair[2 * c + 1];
        }
    }
    for (std::size_t c = 0; c < n; ++c) {
        const float product = static_cast<float>(sums[c]) * scale[c];
        x[c] = product + mean[c];
    }
}

// f64(n * inv_freq) for one token, its cosine and sine by polynomials in a quarter turn around 0.
LMKV_CLONES void turn(const double* __restrict inv_freq, std::size_t count, double position, double factor,
                      float* __restrict cos, float* __restrict sin) {
    for (std::size_t i = 0; i < count; ++i) {
        const double angle = position * inv_freq[i];
        const double turns = std::floor(angle * 0.6366197723675814 + 0.5);
        const double r =
            ((angle - turns * 1.570796251296997) - turns * 7.549789415861596e-08) - turns * 5.390302858158119e-15;
        const double square = r * r;
        double sine = 1.0 / 6227020800 * square + -1.0 / 39916800;
        sine = sine * square + 1.0 / 362880;
        sine = sine * square + -1.0 / 5040;
        sine = sine * square + 1.0 / 120;
        sine = sine * square + -1.0 / 6;
        sine = r + r * (square * sine);
        double cosine = -1.0 / 87178291200 * square + 1.0 / 479001600;
        cosine = cosine * square + -1.0 / 3628800;
        cosine = cosine * square + 1.0 / 40320;
        cosine = cosine * square + -1.0 / 720;
        cosine = cosine * square + 1.0 / 24;
        cosine = cosine * square + -1.0 / 2;
        cosine = 1.0 + square * cosine;
        const double quarter = turns - 4 * std::floor(turns * 0.25);  // 0 to 3
        const bool odd = (quarter == 1) | (quarter == 3);
        cos[i] = static_cast<float>((odd ? sine : cosine) * ((quarter == 1) | (quarter == 2) ? -factor : factor));
        sin[i] = static_cast<float>((odd ? cosine : sine) * (quarter >= 2 ? -factor : factor));
    }
}

}  // namespace

void klt_sums_portable(const std::int16_t* numbers, const KltEntries& entries, std::size_t tokens, bool fresh,
                       std::int32_t* sums) {
    if (fresh) std::fill_n(sums, tokens * kKltSlab, 0);
    for (std::size_t t = 0; t < tokens; ++t, sums += kKltSlab) {
        const KltEntries mine = at(entries, t);
        for (std::size_t i = 0; i < *mine.counts; ++i) {
            const int one = static_cast<std::int16_t>(mine.values[i]);
            const int two = static_cast<std::int16_t>(mine.values[i] >> 16);
            const std::int16_t* const pair = numbers + mine.offsets[i] / sizeof *numbers;
            for (std::size_t c = 0; c < kKltSlab; ++c) {
                const auto product =
                    static_cast<std::uint32_t>(one * pair[2 * c]) + static_cast<std::uint32_t>(two * pair[2 * c + 1]);
                sums[c] = static_cast<std::int32_t>(static_cast<std::uint32_t>(sums[c]) + product);
            }
        }
    }
}

KltMatrix::KltMatrix(const std::int16_t* matrix, std::size_t channels_in, std::size_t kept_in)
    : channels(channels_in), kept(kept_in) {
    const std::size_t pairs = up(kept, 2), slabs = up(channels, kKltSlab);
    packed_.resize(slabs * pairs * kPairBytes / sizeof(Line));
    for (std::size_t c = 0; c < channels; ++c) {
        auto* to = const_cast<std::int16_t*>(slab(c / kKltSlab)) + 2 * (c % kKltSlab);
        for (std::size_t k = 0; k < kept; ++k, ++matrix) {
            to[k / 2 * 2 * kKltSlab + k % 2] = *matrix;
            largest_ = std::max<std::int64_t>(largest_, std::abs(static_cast<int>(*matrix)));
        }
    }
}

const std::int16_t* KltMatrix::slab(std::size_t i) const {
    return packed_[i * up(kept, 2) * kPairBytes / sizeof(Line)].values;
}

std::size_t KltMatrix::tile() const {
    constexpr std::size_t kEntries = std::size_t{1} << 18;
    return std::clamp<std::size_t>(kEntries / up(kept, 2) / 8 * 8, 16, 256);
}

void KltMatrix::transform(const std::int16_t* q, std::size_t tokens, std::size_t step, const float* scale,
                          const float* mean, float* x) const {
    thread_local Scratch scratch;
    const std::size_t pairs = up(kept, 2), chunks = up(pairs, kKltChunk);
    const auto grow = [](auto& values, std::size_t n) {
        if (values.size() < n) values.resize(n);
        return values.data();
    };
    const KltEntries entries{grow(scratch.offsets, chunks * tokens * kKltChunk),
                             grow(scratch.values, chunks * tokens * kKltChunk), grow(scratch.counts, chunks * tokens)};
    std::uint32_t* const sizes = grow(scratch.sizes, tokens);
    std::int32_t* const sums = grow(scratch.sums, tokens * kKltSlab);
    std::fill_n(sizes, tokens, 0);
    auto add = klt_sums_portable;
    [[maybe_unused]] std::size_t eights = 0;  // tokens that are listed eight at a time
#if defined(__x86_64__)
    if (simd() >= Simd::avx2) add = klt_sums_avx2, eights = tokens / 8 * 8;
#endif
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        const std::size_t first = 2 * kKltChunk * chunk, rows = std::min(2 * kKltChunk, kept - first);
        for (std::size_t t = 0; t < tokens;) {
            const KltEntries mine = at(entries, chunk * tokens + t);
            const std::int16_t* const from = q + first * step + t;
#if defined(__x86_64__)
            if (t < eights) {
                klt_list_avx2(from, step, rows, mine, sizes + t);
                t += 8;
                continue;
            }
#endif
            list_plainly(from, step, rows, mine, sizes + t);
            ++t;
        }
    }
    for (std::size_t c = 0; c < channels; c += kKltSlab) {
        const std::int16_t* const numbers = slab(c / kKltSlab);
        const std::size_t n = std::min(kKltSlab, channels - c);
        for (std::size_t chunk = 0; chunk < chunks; ++chunk)
            add(numbers + 2 * kKltSlab * kKltChunk * chunk, at(entries, chunk * tokens), tokens, chunk == 0, sums);
        finish(sums, tokens, scale + c, mean + c, n, x + c, channels);
        // Wrapped sums are right again in the end if the end fits.
        for (std::size_t t = 0; t < tokens; ++t)
            if (largest_ * sizes[t] > INT32_MAX)
                finish_wide(numbers, at(entries, t), chunks, tokens, scale + c, mean + c, n, x + t * channels + c);
    }
}

void klt_cos_sin(const double* inv_freq, std::size_t count, std::uint64_t first, std::size_t tokens, double factor,
                 float* cos, float* sin) {
    for (std::size_t t = 0; t < tokens; ++t)
        turn(inv_freq, count, static_cast<double>(first + t), factor, cos + t * count, sin + t * count);
}

}  // namespace lmkv
