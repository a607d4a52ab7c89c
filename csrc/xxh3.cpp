#include "xxh3.h"

#include <bit>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmkv {
namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using u128 = unsigned __int128;

constexpr u64 kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr u64 kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63;
constexpr u64 kPrime64_5 = 0x27D4EB2F165667C5;
constexpr u64 kMix1 = 0x165667919E3779F9, kMix2 = 0x9FB21C651E98DF25;

alignas(64) constexpr u8 kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr std::size_t kStripe = 64, kStripesPerBlock = 16, kBlock = kStripe * kStripesPerBlock;
constexpr std::size_t kScrambleSecret = sizeof kSecret - 64, kLastSecret = sizeof kSecret - 71;

u32 read32(const u8* p) {
    u32 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

u64 read64(const u8* p) {
    u64 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

u64 secret(std::size_t at) { return read64(kSecret + at); }

u64 fold(u64 a, u64 b) {
    const u128 product = static_cast<u128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

u64 avalanche(u64 x) {
    x = (x ^ (x >> 37)) * kMix1;
    return x ^ (x >> 32);
}

u64 avalanche_xxh64(u64 x) {
    x = (x ^ (x >> 33)) * kPrime64_2;
    x = (x ^ (x >> 29)) * kPrime64_3;
    return x ^ (x >> 32);
}

u64 mix16(const u8* p, std::size_t at) { return fold(read64(p) ^ secret(at), read64(p + 8) ^ secret(at + 8)); }

u64 small(const u8* p, std::size_t n) {
    if (n == 0) return avalanche_xxh64(secret(56) ^ secret(64));
    if (n <= 3) {
        const u32 combined =
            p[n - 1] | static_cast<u32>(n) << 8 | static_cast<u32>(p[0]) << 16 | static_cast<u32>(p[n >> 1]) << 24;
        return avalanche_xxh64((read32(kSecret) ^ read32(kSecret + 4)) ^ combined);
    }
    if (n <= 8) {
        const u64 combined = read32(p + n - 4) | static_cast<u64>(read32(p)) << 32;
        u64 x = secret(8) ^ secret(16) ^ combined;
        x = (x ^ std::rotl(x, 49) ^ std::rotl(x, 24)) * kMix2;
        x = (x ^ ((x >> 35) + n)) * kMix2;
        return x ^ (x >> 28);
    }
    const u64 low = secret(24) ^ secret(32) ^ read64(p);
    const u64 high = secret(40) ^ secret(48) ^ read64(p + n - 8);
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
}

u64 medium(const u8* p, std::size_t n) {
    u64 acc = n * kPrime64_1;
    if (n <= 128) {
        for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;)
            acc += mix16(p + 16 * i, 32 * i) + mix16(p + n - 16 * i - 16, 32 * i + 16);
        return avalanche(acc);
    }
    for (std::size_t i = 0; i < 8; ++i) acc += mix16(p + 16 * i, 16 * i);
    acc = avalanche(acc);
    for (std::size_t i = 8; i < n / 16; ++i) acc += mix16(p + 16 * i, 16 * (i - 8) + 3);
    return avalanche(acc + mix16(p + n - 16, 119));
}

void accumulate(u64* acc, const u8* stripe, std::size_t at) {
    for (std::size_t i = 0; i < 8; ++i) {
        const u64 word = read64(stripe + 8 * i), value = word ^ secret(at + 8 * i);
        acc[i ^ 1] += word;
        acc[i] += (value & 0xFFFFFFFF) * (value >> 32);
    }
}

// All of a large input into the eight accumulators (specification, steps 2 and 3).
void consume_portable(u64* acc, const u8* p, std::size_t n) {
    const u8* const last = p + n - kStripe;
    for (; n > kBlock; p += kBlock, n -= kBlock) {
        for (std::size_t s = 0; s < kStripesPerBlock; ++s) accumulate(acc, p + s * kStripe, 8 * s);
        for (std::size_t i = 0; i < 8; ++i)
            acc[i] = (acc[i] ^ (acc[i] >> 47) ^ secret(kScrambleSecret + 8 * i)) * kPrime32_1;
    }
    for (std::size_t s = 0; s < (n - 1) / kStripe; ++s) accumulate(acc, p + s * kStripe, 8 * s);
    accumulate(acc, last, kLastSecret);
}

#if defined(__x86_64__)

#define LMKV_AVX2 __attribute__((target("avx2"), always_inline)) inline

LMKV_AVX2 __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

LMKV_AVX2 __m256i step(__m256i acc, const u8* stripe, std::size_t at) {
    const __m256i data = load(stripe), value = _mm256_xor_si256(data, load(kSecret + at));
    const __m256i product = _mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
}

LMKV_AVX2 __m256i scramble(__m256i acc, std::size_t at) {
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32_1));
    const __m256i x = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), load(kSecret + at));
    const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime), high);
}

__attribute__((target("avx2"))) void consume_avx2(u64* acc, const u8* p, std::size_t n) {
    const u8* const last = p + n - kStripe;
    __m256i a = load(acc), b = load(acc + 4);
    for (; n > kBlock; p += kBlock, n -= kBlock) {
        for (std::size_t s = 0; s < kStripesPerBlock; ++s) {
            // The next block, one line a stripe: a fifth faster on memory that is not in a cache.
            _mm_prefetch(reinterpret_cast<const char*>(p + kBlock + s * kStripe), _MM_HINT_T0);
            a = step(a, p + s * kStripe, 8 * s);
            b = step(b, p + s * kStripe + 32, 8 * s + 32);
        }
        a = scramble(a, kScrambleSecret);
        b = scramble(b, kScrambleSecret + 32);
    }
    for (std::size_t s = 0; s < (n - 1) / kStripe; ++s) {
        a = step(a, p + s * kStripe, 8 * s);
        b = step(b, p + s * kStripe + 32, 8 * s + 32);
    }
    a = step(a, last, kLastSecret);
    b = step(b, last + 32, kLastSecret + 32);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc), a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + 4), b);
}

#endif

u64 large(const u8* p, std::size_t n) {
    u64 acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
#if defined(__x86_64__)
    if (simd() >= Simd::avx2)
        consume_avx2(acc, p, n);
    else
#endif
        consume_portable(acc, p, n);
    u64 result = n * kPrime64_1;
    for (std::size_t i = 0; i < 8; i += 2) result += fold(acc[i] ^ secret(11 + 8 * i), acc[i + 1] ^ secret(19 + 8 * i));
    return avalanche(result);
}

}  // namespace

std::uint64_t xxh3_64(const std::uint8_t* data, std::size_t n) {
    return n <= 16 ? small(data, n) : n <= 240 ? medium(data, n) : large(data, n);
}

}  // namespace lmkv
