// The entropy coder of the lossy and exact codecs: 32-lane interleaved rANS over rows of byte symbols, one static
// table a row. docs/codecs.md ("Entropy coder stream") says what the bytes mean; only the decoder is normative.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace lmkv {

constexpr std::size_t kRansLanes = 32;
constexpr int kRansMinBits = 8, kRansMaxBits = 12;
constexpr std::size_t kRansMaxStreams = 16;
constexpr std::size_t kRansSmall = 16;  // alphabets up to this size map slots to symbols by alias tables
constexpr std::size_t kRansMaxTableSlots = std::size_t{1} << 24;  // bounds the memory of one model

// Slots to symbols for at most 16 symbols. Slot = bucket * size + within, size = 2^bits / 16. Below split[bucket] the
// symbol is the bucket's own number and its offset is within; else it is other[bucket] at offset within + base[bucket]
// (mod 2^16). Byte planes, so that one byte shuffle looks up 32 lanes.
struct RansAlias {
    alignas(16) std::uint8_t split[16], other[16], freq_low[16], freq_high[16], base_low[16], base_high[16];
};

// What the encoder needs of one table of at most 16 symbols, in byte planes; reciprocal = floor(2^32 / freq).
struct RansPlanes {
    alignas(16) std::uint8_t freq_low[16], freq_high[16], start_low[16], start_high[16], reciprocal[4][16];
};

// Frequency tables, checked once, with what both directions derive from them. Immutable; shared between threads.
class RansModel {
  public:
    // freqs[tables][alphabet], each row summing to 2^bits. std::invalid_argument: it does not, or a size is out of
    // range.
    RansModel(const std::uint16_t* freqs, std::size_t tables, std::size_t alphabet, int bits);

    // The same from a small cache, for tables that are constants of a format.
    static std::shared_ptr<const RansModel> cached(const std::uint16_t* freqs, std::size_t tables, std::size_t alphabet,
                                                   int bits);

    bool small() const { return alphabet <= kRansSmall; }
    bool is(const std::uint16_t* freqs, std::size_t tables, std::size_t alphabet, int bits) const;

    struct Encoder {
        std::vector<std::uint32_t> reciprocal;  // [tables][alphabet]
        std::vector<std::uint16_t> start;       // [tables][alphabet], the symbol's first place in slot_of
        std::vector<std::uint16_t> slot_of;     // [tables][2^bits] + 1; small alphabets only
        std::vector<RansPlanes> planes;         // small alphabets only
    };
    const Encoder& encoder() const;  // built on first use

    const int bits;
    const std::size_t tables, alphabet;
    std::vector<std::uint16_t> freqs;
    std::vector<RansAlias> alias;      // small alphabets
    std::vector<std::uint32_t> slots;  // others, [tables][2^bits]: symbol | freq - 1 << 8 | offset << 20

  private:
    mutable std::once_flag built_;
    mutable Encoder encoder_;
};

// symbols[rows][cols] with model table tables[row] for each row. Returns the bytes written to out, 0 when it is too
// small. streams: how many independent streams the rows are cut into, 0: as many as cost little.
// std::invalid_argument: a symbol without frequency, a table number too high, a size of 0.
std::size_t rans_encode(const std::uint8_t* symbols, std::size_t rows, std::size_t cols, const std::uint16_t* tables,
                        const RansModel& model, std::uint8_t* out, std::size_t capacity, std::size_t streams = 0);

// Fills symbols[rows][cols]. std::invalid_argument: src is not one whole stream of so many symbols; what symbols then
// holds is unspecified.
void rans_decode(const std::uint8_t* src, std::size_t nbytes, const std::uint16_t* tables, const RansModel& model,
                 std::uint8_t* symbols, std::size_t rows, std::size_t cols);

}  // namespace lmkv
