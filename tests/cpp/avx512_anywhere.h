// The few AVX-512 instructions that rans_avx512.cpp uses, lane by lane, so that machines without them test its steps.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace anywhere {

struct M512 {
    std::uint32_t lane[16];
};
using Mask = std::uint16_t;

template <typename Body>
M512 each(const Body& body) {
    M512 out{};
    for (int i = 0; i < 16; ++i) out.lane[i] = static_cast<std::uint32_t>(body(i));
    return out;
}

inline M512 load(const void* at) {
    M512 out;
    std::memcpy(&out, at, sizeof out);
    return out;
}
inline void store(void* at, const M512& v) { std::memcpy(at, &v, sizeof v); }
inline M512 set1(int v) {
    return each([&](int) { return v; });
}
inline M512 widen_bytes(__m128i v) {
    std::uint8_t bytes[16];
    std::memcpy(bytes, &v, sizeof bytes);
    return each([&](int i) { return bytes[i]; });
}
inline M512 widen_words(__m256i v) {
    std::uint16_t words[16];
    std::memcpy(words, &v, sizeof words);
    return each([&](int i) { return words[i]; });
}
inline __m128i narrow_bytes(const M512& v) {
    std::uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(v.lane[i]);
    __m128i out;
    std::memcpy(&out, bytes, sizeof out);
    return out;
}
inline M512 either(const M512& a, const M512& b) {
    return each([&](int i) { return a.lane[i] | b.lane[i]; });
}
inline M512 both(const M512& a, const M512& b) {
    return each([&](int i) { return a.lane[i] & b.lane[i]; });
}
inline M512 plus(const M512& a, const M512& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline M512 times(const M512& a, const M512& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline M512 left(const M512& a, unsigned n) {
    return each([&](int i) { return a.lane[i] << n; });
}
inline M512 right(const M512& a, const M512& n) {
    return each([&](int i) { return a.lane[i] >> n.lane[i]; });
}
inline M512 pick(const M512& index, const M512& table) {
    return each([&](int i) { return table.lane[index.lane[i] & 15]; });
}
inline M512 where(const M512& otherwise, Mask mask, const M512& v) {
    return each([&](int i) { return mask >> i & 1 ? v.lane[i] : otherwise.lane[i]; });
}
inline Mask at_least(const M512& a, const M512& b) {
    Mask out = 0;
    for (int i = 0; i < 16; ++i) out = static_cast<Mask>(out | (a.lane[i] >= b.lane[i]) << i);
    return out;
}
inline M512 expand(Mask mask, const M512& v) {
    int next = 0;
    return each([&](int i) { return mask >> i & 1 ? v.lane[next++] : 0; });
}

}  // namespace anywhere

#define __m512i anywhere::M512
#define __mmask16 anywhere::Mask
#define _mm512_load_si512 anywhere::load
#define _mm512_store_si512 anywhere::store
#define _mm512_set1_epi32 anywhere::set1
#define _mm512_cvtepu8_epi32 anywhere::widen_bytes
#define _mm512_cvtepu16_epi32 anywhere::widen_words
#define _mm512_cvtepi32_epi8 anywhere::narrow_bytes
#define _mm512_or_si512 anywhere::either
#define _mm512_and_si512 anywhere::both
#define _mm512_add_epi32 anywhere::plus
#define _mm512_mullo_epi32 anywhere::times
#define _mm512_slli_epi32 anywhere::left
#define _mm512_srlv_epi32 anywhere::right
#define _mm512_permutexvar_epi32 anywhere::pick
#define _mm512_mask_permutexvar_epi32(a, mask, index, table) anywhere::where(a, mask, anywhere::pick(index, table))
#define _mm512_maskz_permutexvar_epi32(mask, index, table) \
    anywhere::where(anywhere::M512{}, mask, anywhere::pick(index, table))
#define _mm512_cmpge_epu32_mask anywhere::at_least
#define _mm512_cmplt_epu32_mask(a, b) static_cast<anywhere::Mask>(~anywhere::at_least(a, b))
#define _mm512_maskz_expand_epi32 anywhere::expand
#define _mm512_mask_or_epi32(a, mask, b, c) anywhere::where(a, mask, anywhere::either(b, c))
