// Small alphabets of the two table sizes that codecs use, eight lanes a vector: symbols of a whole group are looked up
// at once in byte lanes.
#include <immintrin.h>

#include <algorithm>
#include <array>

#include "rans_core.h"

namespace lmkv {
namespace {

#define LMKV_INLINE __attribute__((always_inline)) inline

template <std::size_t kBytes>
using Shuffles = std::array<std::array<std::uint8_t, kBytes>, 256>;

// For each mask of eight lanes: the next words to the lanes in the mask, in order, from either half of a vector.
constexpr Shuffles<32> make_expand() {
    Shuffles<32> out{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        std::uint8_t next = 0;
        for (unsigned lane = 0; lane < 8; ++lane)
            for (unsigned byte = 0; byte < 4; ++byte)
                out[mask][4 * lane + byte] = byte < 2 && mask >> lane & 1 ? next++ : std::uint8_t{0x80};
    }
    return out;
}

// And back: the words of the lanes in the mask, in order, up to the vector's end.
constexpr Shuffles<16> make_compress() {
    Shuffles<16> out{};
    for (unsigned mask = 0; mask < 256; ++mask) {
        unsigned at = 16;
        for (unsigned lane = 8; lane-- > 0;)
            if (mask >> lane & 1) {
                out[mask][--at] = static_cast<std::uint8_t>(2 * lane + 1);
                out[mask][--at] = static_cast<std::uint8_t>(2 * lane);
            }
        while (at) out[mask][--at] = 0x80;
    }
    return out;
}

alignas(64) constexpr Shuffles<32> kExpand = make_expand();
alignas(64) constexpr Shuffles<16> kCompress = make_compress();

LMKV_INLINE __m256i plane(const std::uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

LMKV_INLINE __m128i load128(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }

// Vector v of a group: see rans_lane().
LMKV_INLINE void load_states(const std::uint32_t* lanes, __m256i* x) {
    for (int v = 0; v < 4; ++v) x[v] = _mm256_set_m128i(load128(lanes + 16 + 4 * v), load128(lanes + 4 * v));
}

LMKV_INLINE void store_states(const __m256i* x, std::uint32_t* lanes) {
    for (int v = 0; v < 4; ++v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes + 4 * v), _mm256_castsi256_si128(x[v]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes + 16 + 4 * v), _mm256_extracti128_si256(x[v], 1));
    }
}

LMKV_INLINE int lanes_of(__m256i mask) { return _mm256_movemask_ps(_mm256_castsi256_ps(mask)); }

// Takes a word for every lane below 2^16.
LMKV_INLINE __m256i renormalise(__m256i x, const std::uint8_t*& at) {
    const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
    const auto mask = static_cast<unsigned>(lanes_of(low));
    const __m256i shuffle = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpand[mask].data()));
    const __m256i words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(at)), shuffle);
    at += 2 * __builtin_popcount(mask);
    return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), words), low);
}

template <int kBits>
LMKV_INLINE __m256i decode_group(__m256i* x, const std::uint8_t*& at, const RansAlias& table) {
    const __m256i zero = _mm256_setzero_si256(), slots = _mm256_set1_epi32((1 << kBits) - 1);
    const __m256i inner = _mm256_set1_epi16((1 << (kBits - 4)) - 1);
    const __m256i slot01 = _mm256_packus_epi32(_mm256_and_si256(x[0], slots), _mm256_and_si256(x[1], slots));
    const __m256i slot23 = _mm256_packus_epi32(_mm256_and_si256(x[2], slots), _mm256_and_si256(x[3], slots));
    const __m256i in01 = _mm256_and_si256(slot01, inner), in23 = _mm256_and_si256(slot23, inner);
    const __m256i bucket =
        _mm256_packus_epi16(_mm256_srli_epi16(slot01, kBits - 4), _mm256_srli_epi16(slot23, kBits - 4));
    const __m256i within = _mm256_packus_epi16(in01, in23);
    const __m256i split = _mm256_shuffle_epi8(plane(table.split), bucket);
    const __m256i other = _mm256_shuffle_epi8(plane(table.other), bucket);
    const __m256i is_other = _mm256_cmpeq_epi8(_mm256_max_epu8(within, split), within);
    const __m256i symbol = _mm256_blendv_epi8(bucket, other, is_other);
    const __m256i base_low = _mm256_and_si256(_mm256_shuffle_epi8(plane(table.base_low), bucket), is_other);
    const __m256i base_high = _mm256_and_si256(_mm256_shuffle_epi8(plane(table.base_high), bucket), is_other);
    const __m256i freq_low = _mm256_shuffle_epi8(plane(table.freq_low), symbol);
    const __m256i freq_high = _mm256_shuffle_epi8(plane(table.freq_high), symbol);
    const __m256i offset01 = _mm256_add_epi16(in01, _mm256_unpacklo_epi8(base_low, base_high));
    const __m256i offset23 = _mm256_add_epi16(in23, _mm256_unpackhi_epi8(base_low, base_high));
    const __m256i freq01 = _mm256_unpacklo_epi8(freq_low, freq_high);
    const __m256i freq23 = _mm256_unpackhi_epi8(freq_low, freq_high);
    const auto advance = [&](__m256i state, __m256i freq, __m256i offset) {
        state = _mm256_add_epi32(_mm256_mullo_epi32(_mm256_srli_epi32(state, kBits), freq), offset);
        return renormalise(state, at);
    };
    x[0] = advance(x[0], _mm256_unpacklo_epi16(freq01, zero), _mm256_unpacklo_epi16(offset01, zero));
    x[1] = advance(x[1], _mm256_unpackhi_epi16(freq01, zero), _mm256_unpackhi_epi16(offset01, zero));
    x[2] = advance(x[2], _mm256_unpacklo_epi16(freq23, zero), _mm256_unpacklo_epi16(offset23, zero));
    x[3] = advance(x[3], _mm256_unpackhi_epi16(freq23, zero), _mm256_unpackhi_epi16(offset23, zero));
    return symbol;
}

// The first `rows` rows of kStreams streams side by side.
template <int kBits, int kStreams>
bool decode_rows(RansSource* sources, const RansRows* parts, std::size_t begin, std::size_t rows,
                 const RansModel& model) {
    __m256i x[kStreams][4];
    const std::uint8_t* at[kStreams];
    const std::size_t cols = parts[0].cols, whole = cols - cols % kRansLanes;
    for (int s = 0; s < kStreams; ++s) load_states(sources[s].x, x[s]), at[s] = sources[s].at;
    for (std::size_t r = begin; r < rows; ++r) {
        for (std::size_t c = 0; c < whole; c += kRansLanes)
            for (int s = 0; s < kStreams; ++s) {
                if (at[s] > sources[s].limit) [[unlikely]] {
                    sources[s].at = at[s];
                    if (!sources[s].refill()) return false;
                    at[s] = sources[s].at;
                }
                const __m256i symbols = decode_group<kBits>(x[s], at[s], model.alias[parts[s].tables[r]]);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts[s].symbols + r * cols + c), symbols);
            }
        if (whole == cols) continue;
        for (int s = 0; s < kStreams; ++s) {
            sources[s].at = at[s];
            if (at[s] > sources[s].limit && !sources[s].refill()) return false;
            store_states(x[s], sources[s].x);
            rans_decode_group(sources[s], model, parts[s].tables[r], parts[s].symbols + r * cols + whole, cols - whole);
            load_states(sources[s].x, x[s]), at[s] = sources[s].at;
        }
    }
    for (int s = 0; s < kStreams; ++s) store_states(x[s], sources[s].x), sources[s].at = at[s];
    return true;
}

template <int kBits>
bool decode_all(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model) {
    const auto pair = [&](std::size_t i, std::size_t rows) {
        return decode_rows<kBits, 2>(sources + i, parts + i, 0, rows, model);
    };
    for (std::size_t i = 0; i < count; i += 2) {
        const std::size_t common = i + 1 < count ? parts[i + 1].rows : 0;
        if (common && !pair(i, common)) return false;
        if (!decode_rows<kBits, 1>(sources + i, parts + i, common, parts[i].rows, model)) return false;
    }
    return true;
}

// floor(a * b / 2^32) in each lane.
LMKV_INLINE __m256i multiply_high(__m256i a, __m256i b) {
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xAA);
}

template <int kBits>
LMKV_INLINE __m256i encode_vector(__m256i x, __m256i freq, __m256i start, __m256i reciprocal, std::uint8_t*& at,
                                  const std::uint16_t* slot_of) {
    const __m256i fits = _mm256_cmpgt_epi32(freq, _mm256_srli_epi32(x, 32 - kBits));
    const auto mask = static_cast<unsigned>(lanes_of(fits)) ^ 0xFF;
    const __m256i low = _mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xFFFF)), _mm256_setzero_si256());
    const __m128i words = _mm256_castsi256_si128(_mm256_permute4x64_epi64(low, 0x08));
    const __m128i shuffle = _mm_load_si128(reinterpret_cast<const __m128i*>(kCompress[mask].data()));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at - 16), _mm_shuffle_epi8(words, shuffle));
    at -= 2 * __builtin_popcount(mask);
    x = _mm256_blendv_epi8(_mm256_srli_epi32(x, 16), x, fits);
    __m256i quotient = multiply_high(x, reciprocal);  // or one less
    __m256i rest = _mm256_sub_epi32(x, _mm256_mullo_epi32(quotient, freq));
    const __m256i short_by_one = _mm256_cmpgt_epi32(rest, _mm256_add_epi32(freq, _mm256_set1_epi32(-1)));
    quotient = _mm256_sub_epi32(quotient, short_by_one);
    rest = _mm256_sub_epi32(rest, _mm256_and_si256(freq, short_by_one));
    const __m256i pair =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(slot_of), _mm256_add_epi32(start, rest), 2);
    return _mm256_or_si256(_mm256_slli_epi32(quotient, kBits), _mm256_and_si256(pair, _mm256_set1_epi32(0xFFFF)));
}

template <int kBits>
LMKV_INLINE void encode_group(__m256i* x, std::uint8_t*& at, __m256i symbol, const RansPlanes& table,
                              const std::uint16_t* slot_of, __m256i& missing) {
    const __m256i zero = _mm256_setzero_si256();
    const auto look_up = [&](const std::uint8_t* bytes) { return _mm256_shuffle_epi8(plane(bytes), symbol); };
    const __m256i freq_low = look_up(table.freq_low), freq_high = look_up(table.freq_high);
    const __m256i start_low = look_up(table.start_low), start_high = look_up(table.start_high);
    const __m256i byte0 = look_up(table.reciprocal[0]), byte1 = look_up(table.reciprocal[1]);
    const __m256i byte2 = look_up(table.reciprocal[2]), byte3 = look_up(table.reciprocal[3]);
    // Symbols of 16 and more look up 0, too, or another symbol: the caller has a maximum.
    missing = _mm256_or_si256(missing, _mm256_cmpeq_epi8(_mm256_or_si256(freq_low, freq_high), zero));
    const __m256i freq[2] = {_mm256_unpacklo_epi8(freq_low, freq_high), _mm256_unpackhi_epi8(freq_low, freq_high)};
    const __m256i start[2] = {_mm256_unpacklo_epi8(start_low, start_high), _mm256_unpackhi_epi8(start_low, start_high)};
    const __m256i low[2] = {_mm256_unpacklo_epi8(byte0, byte1), _mm256_unpackhi_epi8(byte0, byte1)};
    const __m256i high[2] = {_mm256_unpacklo_epi8(byte2, byte3), _mm256_unpackhi_epi8(byte2, byte3)};
    for (int half = 1; half >= 0; --half) {
        x[2 * half + 1] = encode_vector<kBits>(x[2 * half + 1], _mm256_unpackhi_epi16(freq[half], zero),
                                               _mm256_unpackhi_epi16(start[half], zero),
                                               _mm256_unpackhi_epi16(low[half], high[half]), at, slot_of);
        x[2 * half] = encode_vector<kBits>(x[2 * half], _mm256_unpacklo_epi16(freq[half], zero),
                                           _mm256_unpacklo_epi16(start[half], zero),
                                           _mm256_unpacklo_epi16(low[half], high[half]), at, slot_of);
    }
}

template <int kBits>
RansEncoded encode_rows(RansSink& sink, const RansRows& part, const RansModel& model) {
    constexpr std::ptrdiff_t kRoom = kRansGroupBytes + 16;  // what a group may touch below sink.at
    const RansModel::Encoder& encoder = model.encoder();
    const std::size_t cols = part.cols, whole = cols - cols % kRansLanes;
    __m256i x[4], missing = _mm256_setzero_si256(), largest = missing;
    load_states(sink.x, x);
    for (std::size_t r = part.rows; r-- > 0;) {
        const std::size_t table = part.tables[r];
        const std::uint8_t* const row = part.symbols + r * cols;
        const auto slowly = [&](std::size_t c, std::size_t n) {
            for (std::size_t i = 0; i < n; ++i)
                if (row[c + i] >= model.alphabet || !model.freqs[table * model.alphabet + row[c + i]]) return false;
            store_states(x, sink.x);
            const bool room = rans_encode_group(sink, model, table, row + c, n);
            load_states(sink.x, x);
            if (!room) sink.at = nullptr;
            return true;
        };
        if (whole != cols) {
            if (!slowly(whole, cols - whole)) return RansEncoded::no_code;
            if (!sink.at) return RansEncoded::no_room;
        }
        for (std::size_t c = whole; c > 0;) {
            c -= kRansLanes;
            if (sink.at - sink.begin < kRoom) [[unlikely]] {
                if (!slowly(c, kRansLanes)) return RansEncoded::no_code;
                if (!sink.at) return RansEncoded::no_room;
                continue;
            }
            const __m256i symbols = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c));
            largest = _mm256_max_epu8(largest, symbols);
            encode_group<kBits>(x, sink.at, symbols, encoder.planes[table], &encoder.slot_of[table << kBits], missing);
        }
    }
    store_states(x, sink.x);
    const __m256i sixteen = _mm256_set1_epi8(16);
    missing = _mm256_or_si256(missing, _mm256_cmpeq_epi8(_mm256_max_epu8(largest, sixteen), largest));
    return _mm256_testz_si256(missing, missing) ? RansEncoded::yes : RansEncoded::no_code;
}

}  // namespace

bool rans_decode_avx2(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model) {
    if (model.bits == 10) return decode_all<10>(sources, parts, count, model);
    if (model.bits == 12) return decode_all<12>(sources, parts, count, model);
    return rans_decode_portable(sources, parts, count, model);
}

RansEncoded rans_encode_avx2(RansSink& sink, const RansRows& part, const RansModel& model) {
    if (model.bits == 10) return encode_rows<10>(sink, part, model);
    if (model.bits == 12) return encode_rows<12>(sink, part, model);
    return rans_encode_portable(sink, part, model);
}

}  // namespace lmkv
