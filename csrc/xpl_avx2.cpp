// Putting bfloat16 values together, 32 at a time.
#include <immintrin.h>

#include "xpl_core.h"

namespace lmkv {

std::size_t xpl_join_avx2(const std::uint8_t* symbols, const std::uint8_t* offsets, const std::uint8_t* rests,
                          std::size_t cols, std::uint16_t* row) {
    const auto load = [](const std::uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
    const __m256i zero = _mm256_set1_epi8(kXplZero), escape = _mm256_set1_epi8(kXplEscape);
    const __m256i sign = _mm256_set1_epi8(-128);
    std::size_t c = 0;
    for (; c + 32 <= cols; c += 32) {
        const __m256i symbol = load(symbols + c), rest = load(rests + c);
        if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(symbol, escape))) break;
        const __m256i exponent =
            _mm256_andnot_si256(_mm256_cmpeq_epi8(symbol, zero), _mm256_sub_epi8(load(offsets + c), symbol));
        // high: sign, upper 7 bits of the exponent; low: its last bit, mantissa.
        const __m256i upper = _mm256_andnot_si256(sign, _mm256_srli_epi16(exponent, 1));
        const __m256i last = _mm256_and_si256(sign, _mm256_slli_epi16(exponent, 7));
        const __m256i high = _mm256_or_si256(_mm256_and_si256(sign, rest), upper);
        const __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, rest), last);
        const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
        auto* const to = reinterpret_cast<__m256i*>(row + c);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
    return c;
}

}  // namespace lmkv
