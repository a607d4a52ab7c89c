// The text of a chunk key (docs/format.md), taken apart.
#pragma once

#include <cstdint>
#include <string_view>

namespace lmkv {

struct Key {
    std::uint8_t scope[16], tenant[8], digest[32], parent[8];
    std::uint32_t depth;
    std::uint16_t group, shard;
};

// False, and `key` undefined, unless `text` is exactly what a key prints as.
bool parse_key(std::string_view text, Key& key);

}  // namespace lmkv
