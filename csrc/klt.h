// The lossy codecs' way back from coefficients to cache words, bit for bit as lmkv/codec/klt_reference.py defines it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// What lmkv/codec/coefficients.py calls rows: q[rows][cols] from symbols, the low bits of shifted rows (`width` = bytes
// of a bit row) and the escaped values. Symbol s < 15 is (s - 7) << shift, less half of 1 << shift, plus the low bits.
// False: not exactly as many escapes as symbols 15. low holds width bytes for each bit of each row's shift.
bool coefficients_join(const std::uint8_t* symbols, const std::uint8_t* shifts, std::size_t rows, std::size_t cols,
                       const std::uint8_t* low, const std::uint8_t* escapes, std::size_t escape_count, std::int16_t* q);

// out[c][t] = f32(f32(sum over k of matrix[c][k] * q[k][t]) * scale[c]) + mean[c], sums exact.
// matrix: [channels][kept], q: [kept][tokens], out: [channels][tokens].
void klt_transform(const std::int16_t* matrix, const std::int16_t* q, const float* scale, const float* mean,
                   std::size_t channels, std::size_t kept, std::size_t tokens, float* out);

// Where the channels of one layer's K or V go: channel h * dim + d of token p * page_tokens + t goes to
// start + p * page + t * token + h * head + d * channel, in words.
struct KltPlaces {
    std::size_t pages, page_tokens, heads, dim;
    std::int64_t start, page, token, head, channel;
};

// Pairs of channels of a head that are rotated: (i, i + pairs), or (2i, 2i + 1) where interleaved. cos and sin:
// [pairs][tokens]. Without pairs nothing is.
struct KltRope {
    const float *cos, *sin;
    std::size_t pairs;
    bool interleaved;
};

// Rotates x[heads * dim][tokens], rounds it to bfloat16 and writes it to words.
void klt_write_bf16(const float* x, const KltRope& rope, const KltPlaces& places, std::uint16_t* words);

}  // namespace lmkv
