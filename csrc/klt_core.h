// Inside the inverse transform: what the portable and the vector variants share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// Channels of a slab: eight vectors of sums. Pairs of coefficients of a chunk: their numbers for one slab, 20 KiB, stay
// in the first cache while all tokens go by.
constexpr std::size_t kKltSlab = 64, kKltChunk = 80;

// For each chunk of pairs and each token, the pairs of coefficients that are not both zero: where the pair's numbers
// lie in the chunk, in bytes, and the pair. List i has counts[i] entries from i * kKltChunk on.
struct KltEntries {
    std::uint32_t *offsets, *values;
    std::uint32_t* counts;
};

inline KltEntries at(const KltEntries& entries, std::size_t list) {
    return {entries.offsets + list * kKltChunk, entries.values + list * kKltChunk, entries.counts + list};
}
// sums[tokens][64] += what the lists of the `tokens` tokens say, mod 2^32. numbers: [pairs][64][2].
void klt_sums_portable(const std::int16_t* numbers, const KltEntries& entries, std::size_t tokens, bool fresh,
                       std::int32_t* sums);

#if defined(__x86_64__)
void klt_sums_avx2(const std::int16_t* numbers, const KltEntries& entries, std::size_t tokens, bool fresh,
                   std::int32_t* sums);

// The lists of one chunk and eight tokens: `pairs` pairs of rows of q, of which rows are there. Adds each token's sum
// of sizes to sizes[8].
void klt_list_avx2(const std::int16_t* q, std::size_t step, std::size_t rows, const KltEntries& entries,
                   std::uint32_t* sizes);

// to[j * to_step + i] = from[i * from_step + j]; rows and cols are multiples of eight.
void klt_turn_over_avx2(const float* from, std::size_t from_step, std::size_t rows, std::size_t cols, float* to,
                        std::size_t to_step);
#endif

}  // namespace lmkv
