// The lossy codecs' way from cache words to coefficients and back; the way back is bit for bit what
// lmkv/codec/klt_reference.py defines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lmkv {

// Rows of coefficients, and what stands for them in a stream: see lmkv/codec/coefficients.py. Row i of `count` is row
// rows[i] of q[..][cols], rows rising. A row with a shift keeps `shift` bits of each column in low, (cols + 7) / 8
// bytes a bit.
struct CoefficientRows {
    const std::uint32_t* rows;
    const std::uint8_t* shifts;  // at most 8
    std::size_t count, cols;
};

// q[all][cols] from symbols[count][cols], low bits and escaped values; the rows that are not named become zero. Symbol
// s < 15 is (s - 7) << shift, less half of 1 << shift, plus the low bits. False: not exactly as many escapes as 15s.
bool coefficients_join(const std::uint8_t* symbols, const CoefficientRows& which, const std::uint8_t* low,
                       const std::uint8_t* escapes, std::size_t escape_count, std::int16_t* q, std::size_t all);

class RansModel;

// What row ids stand for: a table of the model, and a shift of at most 8. Id 0 is a row of zeros.
struct CoefficientIds {
    const std::uint16_t* tables;
    const std::uint8_t* shifts;
    std::size_t count;  // at most 256
    const RansModel* model;
};

// q[rows][cols] of a whole stream of coefficients. defaults: the id expected of each row; null: the stream's own for
// all. std::invalid_argument: it is no stream of this size; what q then holds is unspecified.
void coefficients_decode(const std::uint8_t* src, std::size_t nbytes, const CoefficientIds& known,
                         const std::uint8_t* defaults, std::int16_t* q, std::size_t rows, std::size_t cols);

// The opposite of joining. tables[count] name rows of freqs[..][16]; a symbol without frequency there is escaped.
// Returns how many values it wrote to escapes, which has room for all.
std::size_t coefficients_split(const std::int16_t* q, const CoefficientRows& which, const std::uint16_t* tables,
                               const std::uint16_t* freqs, std::uint8_t* symbols, std::uint8_t* low,
                               std::int16_t* escapes);

// counts[count][16]: how often each symbol stands in each row, where every row has this shift.
void coefficients_counts(const std::int16_t* q, const std::uint32_t* rows, std::size_t count, std::size_t cols,
                         int shift, std::uint32_t* counts);

// The sum of squares of each row of q[rows][cols].
void coefficients_squares(const std::int16_t* q, std::size_t rows, std::size_t cols, std::int64_t* squares);

// The inverse transform's matrix, laid out once for its kernels: slabs of 64 channels; in each, pairs of coefficients
// one after another; in each, two numbers for every channel. Immutable; shared between threads.
class KltMatrix {
  public:
    KltMatrix(const std::int16_t* matrix, std::size_t channels, std::size_t kept);

    // x[tokens][channels] = f32(f32(sum over k of matrix[c][k] * q[k][t]) * scale[c]) + mean[c], sums exact.
    // q: [kept][step], of which this is about the first `tokens` columns.
    void transform(const std::int16_t* q, std::size_t tokens, std::size_t step, const float* scale, const float* mean,
                   float* x) const;

    // Tokens that are best transformed at a time: what is kept for them fits in a core's caches.
    std::size_t tile() const;

    const std::size_t channels, kept;

  private:
    struct alignas(64) Line {
        std::int16_t values[32];
    };
    const std::int16_t* slab(std::size_t i) const;

    std::vector<Line> packed_;
    std::int64_t largest_ = 0;  // |number| of the matrix
};

// cos and sin of each token's angles times factor, [tokens][count] each, as klt_reference.cos_sin.
void klt_cos_sin(const double* inv_freq, std::size_t count, std::uint64_t first, std::size_t tokens, double factor,
                 float* cos, float* sin);

// Where K or V of some layers stands: channel d of head h of token p * page_tokens + t of layer l is at
// start + l * layer + p * page + t * token + h * head + d * channel, in words.
struct KltPlaces {
    std::size_t layers, pages, page_tokens, heads, dim;
    std::int64_t start, layer, page, token, head, channel;
};

// Pairs of channels of a head that are rotated: (i, i + pairs), or (2i, 2i + 1) where interleaved. cos and sin:
// [tokens][pairs]. Without pairs nothing is.
struct KltRope {
    const float *cos, *sin;
    std::size_t pairs;
    bool interleaved;
};

// Rotates x[layers][heads * dim][tokens], rounds it to bfloat16 and writes it to words; layer_step values lie between
// the layers of x.
void klt_write_bf16(const float* x, std::size_t layer_step, const KltRope& rope, const KltPlaces& places,
                    std::uint16_t* words);

// The opposite, but for the rounding: a rotation by cos and sin is taken back. Returns the largest word without its
// sign: that of a number that is not finite is 0x7F80 or more.
std::uint16_t klt_read_bf16(const std::uint16_t* words, const KltRope& rope, const KltPlaces& places, float* x,
                            std::size_t layer_step);

// Transforms q[kept][tokens], and writes the channels, which are layer by layer those of each of `count` places, as
// klt_write_bf16() does. Only the first places are rotated.
void klt_write_block(const KltMatrix& matrix, const std::int16_t* q, const float* scale, const float* mean,
                     const KltRope& rope, const KltPlaces* places, std::size_t count, std::uint16_t* words);

}  // namespace lmkv
