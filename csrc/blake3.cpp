#include "blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "blake3_core.h"
#include "cpu.h"

namespace lmkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie");

constexpr std::size_t kMaxLanes = 16;

struct Rotate {
    template <int kBits>
    static std::uint32_t by(std::uint32_t x) {
        return std::rotr(x, kBits);
    }
};

void one_lane(const LaneWork& work, std::size_t lane, std::uint8_t* out) {
    std::uint32_t h[8];
    std::memcpy(h, work.key, sizeof h);
    const std::uint64_t counter = work.counter + lane * work.counter_step;
    const std::size_t blocks = block_count(work.bytes);
    for (std::size_t block = 0; block < blocks; ++block) {
        const bool last = block + 1 == blocks;
        const std::size_t at = block * kBlockBytes, length = last ? work.bytes - at : kBlockBytes;
        std::uint32_t m[16] = {}, v[16];
        if (length) std::memcpy(m, work.in[lane] + at, length);
        std::memcpy(v, h, sizeof h);
        std::memcpy(v + 8, kIv, 16);
        v[12] = static_cast<std::uint32_t>(counter);
        v[13] = static_cast<std::uint32_t>(counter >> 32);
        v[14] = static_cast<std::uint32_t>(length);
        v[15] = block_flags(work, block, last);
        mix<Rotate>(v, m);
        for (int i = 0; i < 8; ++i) h[i] = v[i] ^ v[i + 8];
    }
    std::memcpy(out, h, sizeof h);
}

// `lanes` <= kMaxLanes inputs through the widest vector that is not mostly empty.
void run_lanes(LaneWork work, std::size_t lanes) {
    std::uint8_t* const out = work.out;
    if (lanes <= 2) {
        for (std::size_t i = 0; i < lanes; ++i) one_lane(work, i, out + i * kDigestBytes);
        return;
    }
    const Simd level = simd();
    std::size_t width = 4;
#if defined(__x86_64__)
    if (level == Simd::avx512 && lanes > 8)
        width = 16;
    else if (level >= Simd::avx2 && lanes > 4)
        width = 8;
#else
    (void)level;
#endif
    std::uint8_t filled[kMaxLanes * kDigestBytes];
    const std::uint8_t* padded[kMaxLanes];
    for (std::size_t base = 0; base < lanes; base += width) {
        const std::size_t here = std::min(width, lanes - base);
        if (here < width) {
            for (std::size_t i = 0; i < width; ++i) padded[i] = work.in[std::min(i, here - 1)];
            work.in = padded;
        }
        work.out = here == width ? out + base * kDigestBytes : filled;
#if defined(__x86_64__)
        if (width == 16)
            blake3_lanes_x16(work);
        else if (width == 8)
            blake3_lanes_x8(work);
        else
#endif
            blake3_lanes_x4(work);
        if (here < width) std::memcpy(out + base * kDigestBytes, filled, here * kDigestBytes);
        work.in += width, work.counter += width * work.counter_step;
    }
}

std::size_t left_bytes(std::size_t n) { return std::bit_floor((n - 1) / kChunkBytes) * kChunkBytes; }

// Joins pairs of neighbouring subtrees, `lanes` trees side by side.
void parents(const std::uint8_t (*pairs)[2 * kDigestBytes], std::size_t lanes, const std::uint32_t* key,
             std::uint32_t flags, std::uint8_t* out) {
    const std::uint8_t* in[kMaxLanes];
    for (std::size_t i = 0; i < lanes; ++i) in[i] = pairs[i];
    run_lanes({in, kBlockBytes, key, 0, 0, flags | kParent, 0, 0, out}, lanes);
}

// The chaining values out[lanes][32] of the subtrees over in[lane][0, n), which starts at chunk `counter`.
void subtrees(const std::uint8_t* const* in, std::size_t n, std::size_t lanes, const std::uint32_t* key,
              std::uint64_t counter, std::uint32_t flags, std::uint32_t root, std::uint8_t* out) {
    if (n <= kChunkBytes) return run_lanes({in, n, key, counter, 0, flags, kChunkStart, kChunkEnd | root, out}, lanes);
    std::uint8_t pairs[kMaxLanes][2 * kDigestBytes];
    if (lanes == 1 && n <= kMaxLanes * kChunkBytes && n % kChunkBytes == 0 && std::has_single_bit(n / kChunkBytes)) {
        // A lone tree fills the lanes with its own chunks, then with its parents.
        std::size_t width = n / kChunkBytes;
        std::uint8_t values[kMaxLanes * kDigestBytes];
        const std::uint8_t* chunks[kMaxLanes];
        for (std::size_t i = 0; i < width; ++i) chunks[i] = in[0] + i * kChunkBytes;
        run_lanes({chunks, kChunkBytes, key, counter, 1, flags, kChunkStart, kChunkEnd, values}, width);
        for (; width > 2; width /= 2) {
            std::memcpy(pairs, values, width * kDigestBytes);
            parents(pairs, width / 2, key, flags, values);
        }
        std::memcpy(pairs, values, sizeof pairs[0]);
        return parents(pairs, 1, key, flags | root, out);
    }
    const std::size_t left = left_bytes(n);
    std::uint8_t half[kMaxLanes * kDigestBytes];
    const std::uint8_t* right[kMaxLanes];
    subtrees(in, left, lanes, key, counter, flags, 0, half);
    for (std::size_t i = 0; i < lanes; ++i) {
        std::memcpy(pairs[i], half + i * kDigestBytes, kDigestBytes);
        right[i] = in[i] + left;
    }
    subtrees(right, n - left, lanes, key, counter + left / kChunkBytes, flags, 0, half);
    for (std::size_t i = 0; i < lanes; ++i) std::memcpy(pairs[i] + kDigestBytes, half + i * kDigestBytes, kDigestBytes);
    parents(pairs, lanes, key, flags | root, out);
}

}  // namespace

void blake3(const std::uint8_t* data, std::size_t n, const std::uint8_t* key, std::uint8_t* out) {
    std::uint32_t words[8];
    std::memcpy(words, key ? static_cast<const void*>(key) : kIv, sizeof words);
    subtrees(&data, n, 1, words, 0, key ? kKeyed : 0, kRoot, out);
}

void blake3_many(const std::uint8_t* data, std::size_t n, std::size_t count, std::uint8_t* out) {
    const std::uint8_t* in[kMaxLanes];
    for (std::size_t base = 0; base < count; base += kMaxLanes) {
        const std::size_t lanes = std::min(kMaxLanes, count - base);
        for (std::size_t i = 0; i < lanes; ++i) in[i] = data + (base + i) * n;
        subtrees(in, n, lanes, kIv, 0, 0, kRoot, out + base * kDigestBytes);
    }
}

void blake3_link(const std::uint8_t* key, const std::uint8_t* prev, const std::uint8_t* leaf, const std::uint8_t* extra,
                 std::size_t extra_bytes, std::uint8_t* out) {
    std::uint8_t message[3 * kDigestBytes];
    std::memcpy(message, prev, kDigestBytes);
    std::memcpy(message + kDigestBytes, leaf, kDigestBytes);
    if (extra_bytes) std::memcpy(message + 2 * kDigestBytes, extra, extra_bytes);
    blake3(message, 2 * kDigestBytes + extra_bytes, key, out);
}

}  // namespace lmkv
