// Rows of coefficients to symbols, low bits and escapes, and back.
#include <algorithm>
#include <bit>
#include <cstring>

#include "clones.h"
#include "klt.h"

namespace lmkv {
namespace {

static_assert(std::endian::native == std::endian::little, "eight bits become eight bytes in a word");

constexpr std::uint8_t kEscape = 15;
constexpr int kReach = 7;
constexpr std::uint64_t kOnes = 0x0101010101010101;

// Bit j of a byte to byte j, and back; bytes are 0 or 1.
inline std::uint64_t spread(std::uint8_t bits) {
    return ((bits * kOnes & 0x8040201008040201) + 0x7F * kOnes) >> 7 & kOnes;
}

inline std::uint8_t gathered(std::uint64_t bytes) {
    return static_cast<std::uint8_t>(bytes * 0x0102040810204080 >> 56);
}

LMKV_CLONES void join_row(const std::uint8_t* symbols, const std::uint8_t* low, std::size_t cols, int shift,
                          std::int16_t* q) {
    const int half = (1 << shift) >> 1;
    for (std::size_t c = 0; c < cols; ++c)
        q[c] = static_cast<std::int16_t>(((symbols[c] - kReach) << shift) - half + low[c]);
}

LMKV_CLONES void split_row(const std::int16_t* q, std::size_t cols, int shift, std::uint8_t* symbols,
                           std::uint8_t* low) {
    const int half = (1 << shift) >> 1, mask = (1 << shift) - 1;
    for (std::size_t c = 0; c < cols; ++c) {
        const int wide = q[c] + half, high = (wide >> shift) + kReach;
        symbols[c] = static_cast<std::uint8_t>(static_cast<unsigned>(high) > 2 * kReach ? kEscape : high);
        low[c] = static_cast<std::uint8_t>(wide & mask);
    }
}

LMKV_CLONES std::int64_t square_sum(const std::int16_t* q, std::size_t cols) {
    std::int64_t sum = 0;
    for (std::size_t c = 0; c < cols; ++c) sum += q[c] * q[c];
    return sum;
}

}  // namespace

bool coefficients_join(const std::uint8_t* symbols, const CoefficientRows& which, const std::uint8_t* low,
                       const std::uint8_t* escapes, std::size_t escape_count, std::int16_t* q, std::size_t all) {
    const std::size_t cols = which.cols, width = (cols + 7) / 8;
    std::vector<std::uint8_t> below(8 * width);
    std::size_t next = 0;  // row of q
    for (std::size_t r = 0; r < which.count; ++r, symbols += cols) {
        const int shift = which.shifts[r];
        std::int16_t* const row = q + which.rows[r] * cols;
        std::fill(q + next * cols, row, 0);
        next = which.rows[r] + 1;
        for (std::size_t i = 0; i < width; ++i) {
            std::uint64_t bytes = 0;
            for (int bit = 0; bit < shift; ++bit)
                bytes |= spread(low[static_cast<std::size_t>(bit) * width + i]) << bit;
            std::memcpy(&below[8 * i], &bytes, sizeof bytes);
        }
        low += static_cast<std::size_t>(shift) * width;
        join_row(symbols, below.data(), cols, shift, row);
        if (!std::memchr(symbols, kEscape, cols)) continue;
        for (std::size_t c = 0; c < cols; ++c) {
            if (symbols[c] != kEscape) continue;
            if (!escape_count--) return false;
            row[c] = static_cast<std::int16_t>(escapes[0] | escapes[1] << 8);
            escapes += 2;
        }
    }
    std::fill(q + next * cols, q + all * cols, 0);
    return escape_count == 0;
}

std::size_t coefficients_split(const std::int16_t* q, const CoefficientRows& which, const std::uint16_t* tables,
                               const std::uint16_t* freqs, std::uint8_t* symbols, std::uint8_t* low,
                               std::int16_t* escapes) {
    const std::size_t cols = which.cols, width = (cols + 7) / 8;
    std::vector<std::uint8_t> below(8 * width);
    const std::int16_t* const first = escapes;
    for (std::size_t r = 0; r < which.count; ++r, symbols += cols) {
        const std::int16_t* const row = q + which.rows[r] * cols;
        split_row(row, cols, which.shifts[r], symbols, below.data());
        for (int bit = 0; bit < which.shifts[r]; ++bit, low += width)
            for (std::size_t i = 0; i < width; ++i) {
                std::uint64_t bytes;
                std::memcpy(&bytes, &below[8 * i], sizeof bytes);
                low[i] = gathered(bytes >> bit & kOnes);
            }
        std::uint8_t coded[16];
        for (std::uint8_t s = 0; s < 16; ++s) coded[s] = freqs[tables[r] * std::size_t{16} + s] ? s : kEscape;
        for (std::size_t c = 0; c < cols; ++c) symbols[c] = coded[symbols[c]];
        if (!std::memchr(symbols, kEscape, cols)) continue;
        for (std::size_t c = 0; c < cols; ++c)
            if (symbols[c] == kEscape) *escapes++ = row[c];
    }
    return static_cast<std::size_t>(escapes - first);
}

void coefficients_counts(const std::int16_t* q, const std::uint32_t* rows, std::size_t count, std::size_t cols,
                         int shift, std::uint32_t* counts) {
    std::vector<std::uint8_t> symbols(cols), below(cols);
    for (std::size_t r = 0; r < count; ++r, counts += 16) {
        split_row(q + rows[r] * cols, cols, shift, symbols.data(), below.data());
        std::uint32_t some[4][16] = {};  // apart, so that equal neighbours do not wait for each other
        for (std::size_t c = 0; c < cols; ++c) ++some[c % 4][symbols[c]];
        for (std::size_t s = 0; s < 16; ++s) counts[s] = some[0][s] + some[1][s] + some[2][s] + some[3][s];
    }
}

void coefficients_squares(const std::int16_t* q, std::size_t rows, std::size_t cols, std::int64_t* squares) {
    for (std::size_t r = 0; r < rows; ++r) squares[r] = square_sum(q + r * cols, cols);
}

}  // namespace lmkv
