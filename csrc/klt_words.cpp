// Cache words to numbers and back: rotation, rounding to bfloat16, and the order of axes.
#include <algorithm>
#include <bit>

#include "clones.h"
#include "cpu.h"
#include "klt.h"
#include "klt_core.h"

namespace lmkv {
namespace {

constexpr std::size_t kTile = 16;  // tokens that are turned over together

inline std::uint16_t rounded(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest even
}

inline float widened(std::uint16_t word) { return std::bit_cast<float>(std::uint32_t{word} << 16); }

LMKV_CLONES void narrow(const float* __restrict x, std::size_t n, std::uint16_t* __restrict out) {
    for (std::size_t i = 0; i < n; ++i) out[i] = rounded(x[i]);
}

LMKV_CLONES void widen(const std::uint16_t* __restrict words, std::size_t n, float* __restrict out) {
    for (std::size_t i = 0; i < n; ++i) out[i] = widened(words[i]);
}

LMKV_CLONES std::uint16_t largest(const std::uint16_t* __restrict words, std::size_t n) {
    std::uint16_t most = 0;
    for (std::size_t i = 0; i < n; ++i) most = std::max<std::uint16_t>(most, words[i] & 0x7FFF);
    return most;
}

// One token's head, its pairs (i, i + n) or (2i, 2i + 1).
LMKV_CLONES void rotate_halves(const float* __restrict x, std::size_t n, const float* __restrict cos,
                               const float* __restrict sin, std::uint16_t* __restrict out) {
    for (std::size_t i = 0; i < n; ++i) {
        const float a_cos = x[i] * cos[i], b_sin = x[i + n] * sin[i];
        const float b_cos = x[i + n] * cos[i], a_sin = x[i] * sin[i];
        out[i] = rounded(a_cos - b_sin);
        out[i + n] = rounded(b_cos + a_sin);
    }
}

LMKV_CLONES void rotate_twos(const float* __restrict x, std::size_t n, const float* __restrict cos,
                             const float* __restrict sin, std::uint16_t* __restrict out) {
    for (std::size_t i = 0; i < n; ++i) {
        const float a_cos = x[2 * i] * cos[i], b_sin = x[2 * i + 1] * sin[i];
        const float b_cos = x[2 * i + 1] * cos[i], a_sin = x[2 * i] * sin[i];
        out[2 * i] = rounded(a_cos - b_sin);
        out[2 * i + 1] = rounded(b_cos + a_sin);
    }
}

LMKV_CLONES void unrotate_halves(const std::uint16_t* __restrict words, std::size_t n, const float* __restrict cos,
                                 const float* __restrict sin, float* __restrict out) {
    for (std::size_t i = 0; i < n; ++i) {
        const float a = widened(words[i]), b = widened(words[i + n]);
        const float a_cos = a * cos[i], b_sin = b * sin[i], b_cos = b * cos[i], a_sin = a * sin[i];
        out[i] = a_cos + b_sin;
        out[i + n] = b_cos - a_sin;
    }
}

LMKV_CLONES void unrotate_twos(const std::uint16_t* __restrict words, std::size_t n, const float* __restrict cos,
                               const float* __restrict sin, float* __restrict out) {
    for (std::size_t i = 0; i < n; ++i) {
        const float a = widened(words[2 * i]), b = widened(words[2 * i + 1]);
        const float a_cos = a * cos[i], b_sin = b * sin[i], b_cos = b * cos[i], a_sin = a * sin[i];
        out[2 * i] = a_cos + b_sin;
        out[2 * i + 1] = b_cos - a_sin;
    }
}

void write_head(const float* x, const KltRope& rope, std::size_t t, std::size_t dim, std::uint16_t* out) {
    const std::size_t n = rope.pairs;
    if (n) (rope.interleaved ? rotate_twos : rotate_halves)(x, n, rope.cos + t * n, rope.sin + t * n, out);
    if (2 * n < dim) narrow(x + 2 * n, dim - 2 * n, out + 2 * n);
}

void read_head(const std::uint16_t* words, const KltRope& rope, std::size_t t, std::size_t dim, float* out) {
    const std::size_t n = rope.pairs;
    if (n) (rope.interleaved ? unrotate_twos : unrotate_halves)(words, n, rope.cos + t * n, rope.sin + t * n, out);
    if (2 * n < dim) widen(words + 2 * n, dim - 2 * n, out + 2 * n);
}

// to[j * to_step + i] = from[i * from_step + j] for i < rows, j < cols.
void turn_over(const float* from, std::size_t from_step, std::size_t rows, std::size_t cols, float* to,
               std::size_t to_step) {
#if defined(__x86_64__)
    if (simd() >= Simd::avx2 && rows % 8 == 0 && cols % 8 == 0) {
        klt_turn_over_avx2(from, from_step, rows, cols, to, to_step);
        return;
    }
#endif
    for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j) to[j * to_step + i] = from[i * from_step + j];
}

// The words of one head of one layer.
struct Head {
    const KltPlaces& places;
    std::int64_t start;

    Head(const KltPlaces& p, std::size_t layer, std::size_t head)
        : places(p),
          start(p.start + static_cast<std::int64_t>(layer) * p.layer + static_cast<std::int64_t>(head) * p.head) {}

    std::int64_t token(std::size_t t) const {
        return start + static_cast<std::int64_t>(t / places.page_tokens) * places.page +
               static_cast<std::int64_t>(t % places.page_tokens) * places.token;
    }
};

// x[dim] to a token's words; row: room for dim words.
void put(const float* x, const KltRope& rope, std::size_t t, const Head& head, std::uint16_t* row,
         std::uint16_t* words) {
    const std::size_t dim = head.places.dim;
    std::uint16_t* const to = words + head.token(t);
    if (head.places.channel == 1) {
        write_head(x, rope, t, dim, to);
        return;
    }
    write_head(x, rope, t, dim, row);
    for (std::size_t d = 0; d < dim; ++d) to[static_cast<std::int64_t>(d) * head.places.channel] = row[d];
}

constexpr KltRope kStill{nullptr, nullptr, 0, false};

}  // namespace

void klt_write_bf16(const float* x, std::size_t layer_step, const KltRope& rope, const KltPlaces& places,
                    std::uint16_t* words) {
    const std::size_t dim = places.dim, tokens = places.pages * places.page_tokens;
    std::vector<float> tile(kTile * dim);
    std::vector<std::uint16_t> row(dim);
    for (std::size_t l = 0; l < places.layers; ++l)
        for (std::size_t h = 0; h < places.heads; ++h) {
            const float* const from = x + l * layer_step + h * dim * tokens;
            const Head head(places, l, h);
            for (std::size_t first = 0; first < tokens; first += kTile) {
                const std::size_t n = std::min(kTile, tokens - first);
                turn_over(from + first, tokens, dim, n, tile.data(), dim);
                for (std::size_t t = 0; t < n; ++t) put(&tile[t * dim], rope, first + t, head, row.data(), words);
            }
        }
}

std::uint16_t klt_read_bf16(const std::uint16_t* words, const KltRope& rope, const KltPlaces& places, float* x,
                            std::size_t layer_step) {
    const std::size_t dim = places.dim, tokens = places.pages * places.page_tokens;
    std::vector<float> tile(kTile * dim);
    std::vector<std::uint16_t> row(dim);
    std::uint16_t most = 0;
    for (std::size_t l = 0; l < places.layers; ++l)
        for (std::size_t h = 0; h < places.heads; ++h) {
            float* const to = x + l * layer_step + h * dim * tokens;
            const Head head(places, l, h);
            for (std::size_t first = 0; first < tokens; first += kTile) {
                const std::size_t n = std::min(kTile, tokens - first);
                for (std::size_t t = 0; t < n; ++t) {
                    const std::uint16_t* from = words + head.token(first + t);
                    if (places.channel != 1) {
                        for (std::size_t d = 0; d < dim; ++d)
                            row[d] = from[static_cast<std::int64_t>(d) * places.channel];
                        from = row.data();
                    }
                    most = std::max(most, largest(from, dim));
                    read_head(from, rope, first + t, dim, &tile[t * dim]);
                }
                turn_over(tile.data(), dim, n, dim, to + first, tokens);
            }
        }
    return most;
}

void klt_write_block(const KltMatrix& matrix, const std::int16_t* q, const float* scale, const float* mean,
                     const KltRope& rope, const KltPlaces* places, std::size_t count, std::uint16_t* words) {
    thread_local std::vector<float> x;
    const std::size_t tokens = places->pages * places->page_tokens, tile = std::min(matrix.tile(), tokens);
    if (x.size() < tile * matrix.channels) x.resize(tile * matrix.channels);
    std::vector<std::uint16_t> row(std::max(places[0].dim, places[count - 1].dim));
    for (std::size_t first = 0; first < tokens; first += tile) {
        const std::size_t n = std::min(tile, tokens - first);
        matrix.transform(q + first, n, tokens, scale, mean, x.data());
        const float* from = x.data();
        for (std::size_t l = 0; l < places->layers; ++l)
            for (std::size_t i = 0; i < count; ++i)
                for (std::size_t h = 0; h < places[i].heads; ++h, from += places[i].dim) {
                    const Head head(places[i], l, h);
                    for (std::size_t t = 0; t < n; ++t)
                        put(from + t * matrix.channels, i ? kStill : rope, first + t, head, row.data(), words);
                }
    }
}

}  // namespace lmkv
