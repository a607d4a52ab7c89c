#include "klt.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "clones.h"
#include "cpu.h"
#include "klt_core.h"

namespace lmkv {
namespace {

constexpr std::uint8_t kEscape = 15;
constexpr int kReach = 7;

LMKV_CLONES void join_row(const std::uint8_t* symbols, std::size_t cols, int shift, std::int16_t* q) {
    const int half = (1 << shift) >> 1;
    for (std::size_t c = 0; c < cols; ++c) q[c] = static_cast<std::int16_t>(((symbols[c] - kReach) << shift) - half);
}

LMKV_CLONES int largest(const std::int16_t* values, std::size_t n) {
    int most = 0;
    for (std::size_t i = 0; i < n; ++i) most = std::max(most, std::abs(static_cast<int>(values[i])));
    return most;
}

LMKV_CLONES std::int64_t sum_of_sizes(const std::int16_t* values, std::size_t n) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < n; ++i) sum += std::abs(static_cast<int>(values[i]));
    return sum;
}

bool any(const std::int16_t* row, std::size_t n) {
    return std::any_of(row, row + n, [](std::int16_t value) { return value != 0; });
}

LMKV_CLONES void pair_up(const std::int16_t* one, const std::int16_t* two, std::int16_t* out) {
    for (std::size_t t = 0; t < kKltTile; ++t) out[2 * t] = one[t], out[2 * t + 1] = two[t];
}

// The definition, for any sums.
void transform_plainly(const std::int16_t* matrix, const std::int16_t* q, const float* scale, const float* mean,
                       std::size_t channels, std::size_t kept, std::size_t tokens, float* out) {
    std::vector<std::int64_t> sums(tokens);
    for (std::size_t c = 0; c < channels; ++c, matrix += kept, out += tokens) {
        std::fill(sums.begin(), sums.end(), 0);
        for (std::size_t k = 0; k < kept; ++k)
            for (std::size_t t = 0; t < tokens; ++t) sums[t] += std::int64_t{matrix[k]} * q[k * tokens + t];
        for (std::size_t t = 0; t < tokens; ++t) {
            const float product = static_cast<float>(sums[t]) * scale[c];
            out[t] = product + mean[c];
        }
    }
}

#if defined(__x86_64__)
void transform_by_tiles(const std::int16_t* matrix, const std::int16_t* q, const float* scale, const float* mean,
                        std::size_t channels, std::size_t kept, std::size_t tokens, float* out) {
    std::vector<std::size_t> first;  // of each pair of rows that is not all zero
    for (std::size_t k = 0; k < kept; k += 2)
        if (any(q + k * tokens, std::min<std::size_t>(2, kept - k) * tokens)) first.push_back(k);
    const std::size_t pairs = first.size(), blocks = (channels + kKltBlock - 1) / kKltBlock;
    std::vector<std::int16_t> packed(2 * kKltBlock * blocks * pairs), tile(2 * kKltTile * pairs);
    std::vector<float> scales(kKltBlock * blocks), means(scales), result(kKltTile * kKltBlock * blocks);
    std::copy(scale, scale + channels, scales.begin());
    std::copy(mean, mean + channels, means.begin());
    const std::size_t whole = pairs - (pairs && first.back() + 1 == kept);
    for (std::size_t c = 0; c < channels; ++c) {
        const std::int16_t* const from = matrix + c * kept;
        std::int16_t* to = packed.data() + 2 * (c / kKltBlock * kKltBlock * pairs + c % kKltBlock);
        for (std::size_t i = 0; i < whole; ++i, to += 2 * kKltBlock) std::memcpy(to, from + first[i], 2 * sizeof *to);
        if (whole < pairs) *to = from[kept - 1];
    }
    for (std::size_t t = 0; t < tokens; t += kKltTile) {
        const std::size_t n = std::min(kKltTile, tokens - t);
        for (std::size_t i = 0; i < pairs; ++i) {
            const std::int16_t* const from = q + first[i] * tokens + t;
            if (n == kKltTile && first[i] + 1 < kept) {
                pair_up(from, from + tokens, &tile[2 * kKltTile * i]);
                continue;
            }
            std::int16_t rows[2][kKltTile] = {};
            std::memcpy(rows[0], from, n * sizeof *from);
            if (first[i] + 1 < kept) std::memcpy(rows[1], from + tokens, n * sizeof *from);
            pair_up(rows[0], rows[1], &tile[2 * kKltTile * i]);
        }
        klt_tile_avx2(packed.data(), tile.data(), pairs, scales.data(), means.data(), blocks, result.data());
        for (std::size_t c = 0; c < channels; ++c)
            std::memcpy(out + c * tokens + t, &result[kKltTile * c], n * sizeof(float));
    }
}
#endif

// To bfloat16, to nearest even.
LMKV_CLONES void narrow(const float* x, std::size_t n, std::uint16_t* out) {
    for (std::size_t t = 0; t < n; ++t) {
        std::uint32_t bits;
        std::memcpy(&bits, x + t, sizeof bits);
        out[t] = static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

LMKV_CLONES void rotate(const float* a, const float* b, const float* cos, const float* sin, std::size_t n, float* one,
                        float* two) {
    for (std::size_t t = 0; t < n; ++t) {
        const float a_cos = a[t] * cos[t], b_sin = b[t] * sin[t], b_cos = b[t] * cos[t], a_sin = a[t] * sin[t];
        one[t] = a_cos - b_sin;
        two[t] = b_cos + a_sin;
    }
}

}  // namespace

bool coefficients_join(const std::uint8_t* symbols, const std::uint8_t* shifts, std::size_t rows, std::size_t cols,
                       const std::uint8_t* low, const std::uint8_t* escapes, std::size_t escape_count,
                       std::int16_t* q) {
    const std::size_t width = (cols + 7) / 8;
    for (std::size_t r = 0; r < rows; ++r, symbols += cols, q += cols) {
        join_row(symbols, cols, shifts[r], q);
        for (int bit = 0; bit < shifts[r]; ++bit, low += width)
            for (std::size_t c = 0; c < cols; ++c)
                q[c] = static_cast<std::int16_t>(q[c] + ((low[c / 8] >> c % 8 & 1) << bit));
        if (!std::memchr(symbols, kEscape, cols)) continue;
        for (std::size_t c = 0; c < cols; ++c) {
            if (symbols[c] != kEscape) continue;
            if (!escape_count--) return false;
            q[c] = static_cast<std::int16_t>(escapes[0] | escapes[1] << 8);
            escapes += 2;
        }
    }
    return escape_count == 0;
}

void klt_transform(const std::int16_t* matrix, const std::int16_t* q, const float* scale, const float* mean,
                   std::size_t channels, std::size_t kept, std::size_t tokens, float* out) {
#if defined(__x86_64__)
    if (simd() >= Simd::avx2) {
        std::int64_t row = 0;
        for (std::size_t c = 0; c < channels; ++c) row = std::max(row, sum_of_sizes(matrix + c * kept, kept));
        if (row * largest(q, kept * tokens) <= INT32_MAX) {
            transform_by_tiles(matrix, q, scale, mean, channels, kept, tokens, out);
            return;
        }
    }
#endif
    transform_plainly(matrix, q, scale, mean, channels, kept, tokens, out);
}

void klt_write_bf16(const float* x, const KltRope& rope, const KltPlaces& places, std::uint16_t* words) {
    const std::size_t dim = places.dim, tokens = places.pages * places.page_tokens;
    std::vector<std::uint16_t> rounded(dim * tokens);
    std::vector<float> one(tokens), two(tokens);
    for (std::size_t h = 0; h < places.heads; ++h, x += dim * tokens) {
        for (std::size_t i = 0; i < rope.pairs; ++i) {
            const std::size_t a = rope.interleaved ? 2 * i : i, b = rope.interleaved ? a + 1 : i + rope.pairs;
            rotate(x + a * tokens, x + b * tokens, rope.cos + i * tokens, rope.sin + i * tokens, tokens, one.data(),
                   two.data());
            narrow(one.data(), tokens, &rounded[a * tokens]);
            narrow(two.data(), tokens, &rounded[b * tokens]);
        }
        const std::size_t done = 2 * rope.pairs;
        narrow(x + done * tokens, (dim - done) * tokens, rounded.data() + done * tokens);
        for (std::size_t p = 0; p < places.pages; ++p)
            for (std::size_t t = 0; t < places.page_tokens; ++t) {
                std::uint16_t* const to = words + places.start + static_cast<std::int64_t>(p) * places.page +
                                          static_cast<std::int64_t>(t) * places.token +
                                          static_cast<std::int64_t>(h) * places.head;
                const std::uint16_t* const from = rounded.data() + p * places.page_tokens + t;
                if (places.channel == 1)
                    for (std::size_t d = 0; d < dim; ++d) to[d] = from[d * tokens];
                else
                    for (std::size_t d = 0; d < dim; ++d)
                        to[static_cast<std::int64_t>(d) * places.channel] = from[d * tokens];
            }
    }
}

}  // namespace lmkv
