// The inverse transform: products of 16-bit pairs, 64 channels of one token in registers.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "klt_core.h"

namespace lmkv {
namespace {

// For each mask of eight lanes: those lanes, in order, first.
constexpr std::array<std::array<std::uint32_t, 8>, 256> make_compress() {
    std::array<std::array<std::uint32_t, 8>, 256> out{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        unsigned n = 0;
        for (unsigned lane = 0; lane < 8; ++lane)
            if (mask >> lane & 1) out[mask][n++] = lane;
    }
    return out;
}

alignas(64) constexpr auto kCompress = make_compress();

__m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
void store(void* at, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(at), value); }

// Eight rows of eight numbers become eight columns.
void transpose(__m256i (&v)[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + j + 2]);
            b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

}  // namespace

void klt_list_avx2(const std::int16_t* q, std::size_t step, std::size_t rows, const KltEntries& entries,
                   std::uint32_t* sizes) {
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    const __m256i lanes = _mm256_setr_epi32(0, 256, 512, 768, 1024, 1280, 1536, 1792);
    const auto row = [&](std::size_t k) {
        return k < rows ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + k * step)) : _mm_setzero_si128();
    };
    static_assert(2 * kKltSlab * sizeof(std::int16_t) == 256 && kKltChunk % 8 == 0);
    __m256i size = load(sizes);
    std::uint32_t n[8] = {};
    for (std::size_t k = 0; k < rows; k += 16) {
        __m256i pairs[8], any = zero;
        for (std::size_t i = 0; i < 8; ++i) {
            const __m128i one = row(k + 2 * i), two = row(k + 2 * i + 1);
            pairs[i] = _mm256_set_m128i(_mm_unpackhi_epi16(one, two), _mm_unpacklo_epi16(one, two));
            any = _mm256_or_si256(any, pairs[i]);
            size = _mm256_add_epi32(size, _mm256_madd_epi16(pairs[i], _mm256_sign_epi16(ones, pairs[i])));
        }
        if (_mm256_testz_si256(any, any)) continue;
        transpose(pairs);
        const __m256i offsets = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(k / 2 * 256)));
        for (std::size_t t = 0; t < 8; ++t) {
            const __m256i none = _mm256_cmpeq_epi32(pairs[t], zero);
            const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(none))) ^ 0xFF;
            const __m256i order = load(kCompress[mask].data());
            // A list has room for every pair of its chunk, so eight more than it has always fit before its end.
            store(entries.offsets + t * kKltChunk + n[t], _mm256_permutevar8x32_epi32(offsets, order));
            store(entries.values + t * kKltChunk + n[t], _mm256_permutevar8x32_epi32(pairs[t], order));
            n[t] += static_cast<std::uint32_t>(__builtin_popcount(mask));
        }
    }
    store(sizes, size);
    std::memcpy(entries.counts, n, sizeof n);
}

void klt_sums_avx2(const std::int16_t* numbers, const KltEntries& entries, std::size_t tokens, bool fresh,
                   std::int32_t* sums) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(numbers);
    const std::uint32_t *offsets = entries.offsets, *values = entries.values;
    for (std::size_t t = 0; t < tokens; ++t, sums += kKltSlab, offsets += kKltChunk, values += kKltChunk) {
        __m256i sum[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) sum[i] = fresh ? _mm256_setzero_si256() : load(sums + 8 * i);
        const std::uint32_t* const end = offsets + entries.counts[t];
        const std::uint32_t* value = values;
        for (const std::uint32_t* offset = offsets; offset != end; ++offset, ++value) {
            const unsigned char* const pair = bytes + *offset;
            const __m256i q = _mm256_set1_epi32(static_cast<int>(*value));
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(q, load(pair + 32 * i)));
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) store(sums + 8 * i, sum[i]);
    }
}

void klt_turn_over_avx2(const float* from, std::size_t from_step, std::size_t rows, std::size_t cols, float* to,
                        std::size_t to_step) {
    for (std::size_t j = 0; j < cols; j += 8)
        for (std::size_t i = 0; i < rows; i += 8) {
            __m256i v[8];
            for (std::size_t a = 0; a < 8; ++a) v[a] = load(from + (i + a) * from_step + j);
            transpose(v);
            for (std::size_t a = 0; a < 8; ++a) store(to + (j + a) * to_step + i, v[a]);
        }
}

}  // namespace lmkv
