// Small alphabets, sixteen lanes a vector: a table of sixteen 32-bit entries is one register.
#include <immintrin.h>

#include "rans_core.h"

namespace lmkv {
namespace {

// Lanes in the order of rans_lane() of half a group.
__m512i load_states(const std::uint32_t* lanes, std::size_t half) {
    alignas(64) std::uint32_t x[16];
    for (std::size_t i = 0; i < 16; ++i) x[i] = lanes[rans_lane(16 * half + i)];
    return _mm512_load_si512(x);
}

void store_states(__m512i vector, std::uint32_t* lanes, std::size_t half) {
    alignas(64) std::uint32_t x[16];
    _mm512_store_si512(x, vector);
    for (std::size_t i = 0; i < 16; ++i) lanes[rans_lane(16 * half + i)] = x[i];
}

__m512i widen(const std::uint8_t* bytes) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

struct Table {
    __m512i split, other, freq, base;
    explicit Table(const RansAlias& a)
        : split(widen(a.split)),
          other(widen(a.other)),
          freq(_mm512_or_si512(widen(a.freq_low), _mm512_slli_epi32(widen(a.freq_high), 8))),
          base(_mm512_or_si512(widen(a.base_low), _mm512_slli_epi32(widen(a.base_high), 8))) {}
};

// One step of sixteen lanes; their symbols.
__m128i step(__m512i& x, const std::uint8_t*& at, const Table& table, unsigned bits) {
    const __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32((1 << bits) - 1));
    const __m512i bucket = _mm512_srlv_epi32(slot, _mm512_set1_epi32(static_cast<int>(bits) - 4));
    const __m512i within = _mm512_and_si512(slot, _mm512_set1_epi32((1 << (bits - 4)) - 1));
    const __mmask16 other = _mm512_cmpge_epu32_mask(within, _mm512_permutexvar_epi32(bucket, table.split));
    const __m512i symbol = _mm512_mask_permutexvar_epi32(bucket, other, bucket, table.other);
    const __m512i base = _mm512_maskz_permutexvar_epi32(other, bucket, table.base);
    const __m512i offset = _mm512_and_si512(_mm512_add_epi32(within, base), _mm512_set1_epi32(0xFFFF));
    const __m512i freq = _mm512_permutexvar_epi32(symbol, table.freq);
    const __m512i high = _mm512_srlv_epi32(x, _mm512_set1_epi32(static_cast<int>(bits)));
    x = _mm512_add_epi32(_mm512_mullo_epi32(high, freq), offset);
    const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(static_cast<int>(kRansLow)));
    const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    const __m512i words = _mm512_maskz_expand_epi32(low, next);
    x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), words);
    at += 2 * __builtin_popcount(low);
    return _mm512_cvtepi32_epi8(symbol);
}

bool decode_one(RansSource& source, const RansRows& part, const RansModel& model) {
    const auto bits = static_cast<unsigned>(model.bits);
    const std::size_t cols = part.cols, whole = cols - cols % kRansLanes;
    const __m256i lane_order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (std::size_t r = 0; r < part.rows; ++r) {
        const Table table(model.alias[part.tables[r]]);
        std::uint8_t* const row = part.symbols + r * cols;
        __m512i x0 = load_states(source.x, 0), x1 = load_states(source.x, 1);
        for (std::size_t c = 0; c < whole; c += kRansLanes) {
            if (source.at > source.limit && !source.refill()) return false;
            const __m128i low = step(x0, source.at, table, bits);
            const __m128i high = step(x1, source.at, table, bits);
            const __m256i symbols = _mm256_permutevar8x32_epi32(_mm256_set_m128i(high, low), lane_order);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + c), symbols);
        }
        store_states(x0, source.x, 0), store_states(x1, source.x, 1);
        if (whole == cols) continue;
        if (source.at > source.limit && !source.refill()) return false;
        rans_decode_group(source, model, part.tables[r], row + whole, cols - whole);
    }
    return true;
}

}  // namespace

bool rans_decode_avx512(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model) {
    for (std::size_t i = 0; i < count; ++i)
        if (!decode_one(sources[i], parts[i], model)) return false;
    return true;
}

}  // namespace lmkv
