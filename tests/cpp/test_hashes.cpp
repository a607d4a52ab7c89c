// BLAKE3 and XXH3 against published values (the official BLAKE3 test input: byte i is i mod 251).
#include <cstring>
#include <vector>

#include "blake3.h"
#include "blake3_core.h"
#include "check.h"
#include "xxh3.h"

namespace lmkv {
void blake3_lanes_x16_anywhere(const LaneWork& work);
}

namespace {

struct Blake3Vector {
    std::size_t n;
    const char *hash, *keyed;
};

const Blake3Vector kBlake3[] = {
    {0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
     "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"},
    {1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
     "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b"},
    {63, "e9bc37a594daad83be9470df7f7b3798297c3d834ce80ba85d6e207627b7db7b",
     "bb1eb5d4afa793c1ebdd9fb08def6c36d10096986ae0cfe148cd101170ce37ae"},
    {64, "4eed7141ea4a5cd4b788606bd23f46e212af9cacebacdc7d1f4c6dc7f2511b98",
     "ba8ced36f327700d213f120b1a207a3b8c04330528586f414d09f2f7d9ccb7e6"},
    {65, "de1e5fa0be70df6d2be8fffd0e99ceaa8eb6e8c93a63f2d8d1c30ecb6b263dee",
     "c0a4edefa2d2accb9277c371ac12fcdbb52988a86edc54f0716e1591b4326e72"},
    {1023, "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
     "c951ecdf03288d0fcc96ee3413563d8a6d3589547f2c2fb36d9786470f1b9d6e"},
    {1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
     "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4"},
    {1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
     "357dc55de0c7e382c900fd6e320acc04146be01db6a8ce7210b7189bd664ea69"},
    {2048, "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
     "879cf1fa2ea0e79126cb1063617a05b6ad9d0b696d0d757cf053439f60a99dd1"},
    {3072, "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2",
     "044a0e7b172a312dc02a4c9a818c036ffa2776368d7f528268d2e6b5df191770"},
    {31744, "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47",
     "efa53b389ab67c593dba624d898d0f7353ab99e4ac9d42302ee64cbf9939a419"},
    {102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
     "1c35d1a5811083fd7119f5d5d1ba027b4d01c0c6c49fb6ff2cf75393ea5db4a7"},
};
const char kKey[] = "whats the Elvish word for friend";

struct Xxh3Vector {
    std::size_t n;
    std::uint64_t hash;
};

const Xxh3Vector kXxh3[] = {
    {0, 0x2D06800538D394C2},    {1, 0xC44BDFF4074EECDB},     {3, 0x5F4299FC161C9CBB},    {4, 0x60DAB036A58211F2},
    {8, 0x3A1C2D7C85AF88F8},    {9, 0xE9612598145BB9DC},     {16, 0x8355E3A6F61770DB},   {17, 0x9EF341A99DE37328},
    {128, 0x85C6174C7FF4C46B},  {129, 0xEC7642B431BA3E5A},   {240, 0x375A384D957FE865},  {241, 0x02E8CD95421C6D02},
    {1024, 0xE5D78BAFA45B2AA5}, {1025, 0xE95C42288F28186E},  {4088, 0x57226523A3A0AC17}, {4096, 0x7135FFA504F1BC71},
    {4160, 0x1DEBA50DE4EAA0F3}, {65536, 0xAAAE63800707A868},
};

using Digest = std::uint8_t[lmkv::kDigestBytes];

std::string hex(const std::uint8_t* digest) {
    std::string text;
    for (std::size_t i = 0; i < lmkv::kDigestBytes; ++i) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", digest[i]);
        text += two;
    }
    return text;
}

// Exactly n bytes on the heap, so that a sanitizer sees the first byte read beyond them.
std::vector<std::uint8_t> input(std::size_t n) {
    std::vector<std::uint8_t> bytes(n);
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(i % 251);
    return bytes;
}

const std::uint8_t* key() { return reinterpret_cast<const std::uint8_t*>(kKey); }

void test_vectors() {
    for (const auto& [n, hash, keyed] : kBlake3) {
        const auto bytes = input(n);
        Digest out;
        lmkv::blake3(bytes.data(), n, nullptr, out);
        CHECK(hex(out) == hash);
        lmkv::blake3(bytes.data(), n, key(), out);
        CHECK(hex(out) == keyed);
    }
    for (const auto& [n, hash] : kXxh3) CHECK(lmkv::xxh3_64(input(n).data(), n) == hash);
}

void test_many_is_one_by_one() {
    for (const std::size_t n : {4u, 64u, 100u, 1024u, 1200u, 3072u, 5000u})
        for (const std::size_t count : {0u, 1u, 2u, 3u, 5u, 8u, 9u, 16u, 17u, 35u}) {
            const auto bytes = input(n * count);
            std::vector<std::uint8_t> many(count * lmkv::kDigestBytes);
            lmkv::blake3_many(bytes.data(), n, count, many.data());
            for (std::size_t i = 0; i < count; ++i) {
                Digest one;
                lmkv::blake3(bytes.data() + i * n, n, nullptr, one);
                CHECK(std::memcmp(one, many.data() + i * lmkv::kDigestBytes, sizeof one) == 0);
            }
        }
}

void test_link_is_keyed_hash_of_its_parts() {
    const auto parts = input(96);
    for (const std::size_t extra : {0u, 1u, 31u, 32u}) {
        Digest link, whole;
        lmkv::blake3_link(key(), parts.data(), parts.data() + 32, parts.data() + 64, extra, link);
        lmkv::blake3(parts.data(), 64 + extra, key(), whole);
        CHECK(std::memcmp(link, whole, sizeof link) == 0);
    }
}

void test_sixteen_lanes() {
    const auto bytes = input(16 * 1024);
    for (const std::size_t n : {0u, 1u, 63u, 64u, 65u, 200u, 1024u}) {
        Digest lanes[16], one;
        const std::uint8_t* in[16];
        for (std::size_t i = 0; i < 16; ++i) in[i] = bytes.data() + i * 1024 - i % 3 * (i > 3);
        const lmkv::LaneWork work{in,      n, lmkv::kIv, 0, 0, 0, lmkv::kChunkStart, lmkv::kChunkEnd | lmkv::kRoot,
                                  lanes[0]};
        lmkv::blake3_lanes_x16_anywhere(work);
        for (std::size_t i = 0; i < 16; ++i) {
            lmkv::blake3(in[i], n, nullptr, one);
            CHECK(std::memcmp(one, lanes[i], sizeof one) == 0);
        }
    }
}

// No published values: the variants must agree at every length and alignment.
void test_variants_agree() {
    const auto bytes = input(5000);
    for (std::size_t n = 0; n < 4500; n += n < 300 ? 1 : 61) {
        const std::uint8_t* at = bytes.data() + n % 7;
        lmkv::limit_simd(lmkv::Simd::portable);
        const std::uint64_t sum = lmkv::xxh3_64(at, n);
        Digest plain, fast;
        lmkv::blake3(at, n, nullptr, plain);
        lmkv::limit_simd(lmkv::Simd::avx512);
        CHECK(lmkv::xxh3_64(at, n) == sum);
        lmkv::blake3(at, n, nullptr, fast);
        CHECK(std::memcmp(plain, fast, sizeof plain) == 0);
    }
}

}  // namespace

void test_hashes() {
    for_each_simd([] {
        test_vectors();
        test_many_is_one_by_one();
        test_link_is_keyed_hash_of_its_parts();
    });
    test_sixteen_lanes();
    test_variants_agree();
}
