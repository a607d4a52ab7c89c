// The inverse transform: products of 16-bit pairs, 16 tokens by four channels in registers.
#include <immintrin.h>

#include <cstring>

#include "klt_core.h"

namespace lmkv {

void klt_tile_avx2(const std::int16_t* matrix, const std::int16_t* q, std::size_t pairs, const float* scale,
                   const float* mean, std::size_t blocks, float* out) {
    const auto load = [](const std::int16_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
    const auto both = [](const std::int16_t* at) {
        std::int32_t pair;
        std::memcpy(&pair, at, sizeof pair);
        return _mm256_set1_epi32(pair);
    };
    for (std::size_t block = 0; block < blocks; ++block) {
        __m256i sum[kKltBlock][2];
        for (auto& each : sum) each[0] = each[1] = _mm256_setzero_si256();
        const std::int16_t* tile = q;
        for (std::size_t i = 0; i < pairs; ++i, matrix += 2 * kKltBlock, tile += 2 * kKltTile) {
            const __m256i q0 = load(tile), q1 = load(tile + kKltTile);
#pragma GCC unroll 4
            for (std::size_t c = 0; c < kKltBlock; ++c) {
                const __m256i m = both(matrix + 2 * c);
                sum[c][0] = _mm256_add_epi32(sum[c][0], _mm256_madd_epi16(q0, m));
                sum[c][1] = _mm256_add_epi32(sum[c][1], _mm256_madd_epi16(q1, m));
            }
        }
#pragma GCC unroll 4
        for (std::size_t c = 0; c < kKltBlock; ++c, out += kKltTile)
            for (int half = 0; half < 2; ++half) {
                const __m256 factor = _mm256_set1_ps(scale[kKltBlock * block + c]);
                const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[c][half]), factor);
                const __m256 value = _mm256_add_ps(product, _mm256_set1_ps(mean[kKltBlock * block + c]));
                _mm256_storeu_ps(out + 8 * half, value);
            }
    }
}

}  // namespace lmkv
