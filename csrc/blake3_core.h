// What the scalar and the vector BLAKE3 share. Included by files compiled for a higher instruction
// set: nothing here may be an ordinary inline function, or its vectorised copy could be linked everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

inline constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8, kKeyed = 16;
inline constexpr std::size_t kBlockBytes = 64, kChunkBytes = 1024;

inline constexpr std::uint32_t kIv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                         0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// kOrder[r][i]: which word of the block round r takes at place i (the paper's permutation, r times).
struct Order {
    std::uint8_t word[7][16];
};
consteval Order make_order() {
    constexpr std::uint8_t step[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    Order order{};
    for (int i = 0; i < 16; ++i) order.word[0][i] = static_cast<std::uint8_t>(i);
    for (int r = 1; r < 7; ++r)
        for (int i = 0; i < 16; ++i) order.word[r][i] = order.word[r - 1][step[i]];
    return order;
}
inline constexpr Order kOrder = make_order();

// The columns, then the diagonals, that one round mixes.
inline constexpr std::uint8_t kQuarter[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                                {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};

// The seven rounds on state v with block m. Word is one word, or that word of several inputs;
// Rotate::by<bits>(word) turns it right.
template <typename Rotate, typename Word>
__attribute__((always_inline)) inline void mix(Word* v, const Word* m) {
#pragma GCC unroll 7
    for (int r = 0; r < 7; ++r) {
#pragma GCC unroll 8
        for (int q = 0; q < 8; ++q) {
            Word &a = v[kQuarter[q][0]], &b = v[kQuarter[q][1]], &c = v[kQuarter[q][2]], &d = v[kQuarter[q][3]];
            a += b + m[kOrder.word[r][2 * q]];
            d = Rotate::template by<16>(d ^ a);
            c += d;
            b = Rotate::template by<12>(b ^ c);
            a += b + m[kOrder.word[r][2 * q + 1]];
            d = Rotate::template by<8>(d ^ a);
            c += d;
            b = Rotate::template by<7>(b ^ c);
        }
    }
}

// One chunk (or parent block) per lane, all of the same length.
struct LaneWork {
    const std::uint8_t* const* in;  // one pointer a lane
    std::size_t bytes;              // of each input, at most kChunkBytes
    const std::uint32_t* key;       // [8]
    std::uint64_t counter;          // chunk number of lane 0
    std::uint64_t counter_step;     // 0 or 1: how it grows from lane to lane
    std::uint32_t flags;            // on every block
    std::uint32_t first_flags;      // added on the first block
    std::uint32_t last_flags;       // added on the last block
    std::uint8_t* out;              // [lanes][32] chaining values, little-endian
};

// The empty input has one (empty) block.
static constexpr std::size_t block_count(std::size_t bytes) {
    return bytes ? (bytes + kBlockBytes - 1) / kBlockBytes : 1;
}

static constexpr std::uint32_t block_flags(const LaneWork& work, std::size_t block, bool last) {
    return work.flags | (block == 0 ? work.first_flags : 0) | (last ? work.last_flags : 0);
}

void blake3_lanes_x4(const LaneWork& work);
void blake3_lanes_x8(const LaneWork& work);   // needs AVX2
void blake3_lanes_x16(const LaneWork& work);  // needs AVX-512

}  // namespace lmkv
