// BLAKE3 (the paper of 2020, default and keyed mode, 32 bytes of output), and the chunk keys built on it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

inline constexpr std::size_t kDigestBytes = 32;

// out[32] of data[n]; key[32] or null.
void blake3(const std::uint8_t* data, std::size_t n, const std::uint8_t* key, std::uint8_t* out);

// out[count][32]: the digest of each of `count` equally long inputs that lie one after another.
void blake3_many(const std::uint8_t* data, std::size_t n, std::size_t count, std::uint8_t* out);

// One link of a digest chain: keyed BLAKE3 of prev[32] || leaf[32] || extra[extra_bytes <= 32].
void blake3_link(const std::uint8_t* key, const std::uint8_t* prev, const std::uint8_t* leaf, const std::uint8_t* extra,
                 std::size_t extra_bytes, std::uint8_t* out);

}  // namespace lmkv
