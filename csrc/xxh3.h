// XXH3, 64-bit, seed 0, default secret (xxHash specification, "XXH3 Algorithm").
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

std::uint64_t xxh3_64(const std::uint8_t* data, std::size_t n);

}  // namespace lmkv
