#include "key.h"

#include <charconv>
#include <cstddef>

namespace lmkv {
namespace {

int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

template <std::size_t kBytes>
bool take(std::string_view& text, std::uint8_t (&out)[kBytes]) {
    if (text.size() < 2 * kBytes) return false;
    for (std::size_t i = 0; i < kBytes; ++i) {
        const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out[i] = static_cast<std::uint8_t>(high << 4 | low);
    }
    text.remove_prefix(2 * kBytes);
    return true;
}

template <typename Number>
bool take(std::string_view& text, Number& out) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    const auto digits = static_cast<std::size_t>(end - text.data());
    if (error != std::errc() || (digits > 1 && text[0] == '0')) return false;
    text.remove_prefix(digits);
    return true;
}

bool dash(std::string_view& text) {
    if (text.empty() || text[0] != '-') return false;
    text.remove_prefix(1);
    return true;
}

}  // namespace

bool parse_key(std::string_view text, Key& key) {
    return take(text, key.scope) && dash(text) && take(text, key.tenant) && dash(text) && take(text, key.digest) &&
           dash(text) && take(text, key.parent) && dash(text) && take(text, key.depth) && dash(text) &&
           take(text, key.group) && dash(text) && take(text, key.shard) && text.empty();
}

}  // namespace lmkv
