// Inside the exact codec: what the portable and the vector variants share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

constexpr std::uint8_t kXplZero = 14, kXplEscape = 15;  // symbols; below them, an exponent is offset - symbol

#if defined(__x86_64__)
// bfloat16: joins groups of 32 values up to one that holds an escape, or the last whole one; how many values it joined.
std::size_t xpl_join_avx2(const std::uint8_t* symbols, const std::uint8_t* offsets, const std::uint8_t* rests,
                          std::size_t cols, std::uint16_t* row);
#endif

}  // namespace lmkv
