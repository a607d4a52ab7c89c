// Inside the inverse transform: what the portable and the vector variants share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

constexpr std::size_t kKltTile = 16, kKltBlock = 4;  // tokens and channels that are worked on together

#if defined(__x86_64__)
// As klt_transform(), for one tile of tokens and `blocks` blocks of channels, sums below 2^31: out[channels][16].
// Rows of coefficients come in `pairs` pairs: matrix[blocks][pairs][4 channels][2], q[pairs][16 tokens][2].
void klt_tile_avx2(const std::int16_t* matrix, const std::int16_t* q, std::size_t pairs, const float* scale,
                   const float* mean, std::size_t blocks, float* out);
#endif

}  // namespace lmkv
