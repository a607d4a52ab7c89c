// Inside the entropy coder: what the portable and the vector variants share.
#pragma once

#include <cstring>

#include "rans.h"

namespace lmkv {

constexpr std::uint32_t kRansLow = 1u << 16;             // states live in [2^16, 2^32)
constexpr std::size_t kRansGroupBytes = 2 * kRansLanes;  // the most that a group of 32 symbols reads

// The order in which the lanes of a group take their words: that of four 8-lane vectors whose 128-bit halves
// hold lanes 4v.. and 16 + 4v.., so that packing them to bytes gives the lanes in order.
constexpr std::size_t rans_lane(std::size_t turn) { return turn / 8 * 4 + turn % 4 + turn / 4 % 2 * 16; }

inline std::uint32_t load_word(const std::uint8_t* at) { return at[0] | at[1] << 8; }

// One stream being decoded. A whole group may always be read at `at` while at <= limit; the last words are read from
// `pad`, followed by zeros.
struct RansSource {
    const std::uint8_t *at, *limit, *end;
    std::uint32_t x[kRansLanes];
    bool in_pad;
    std::uint8_t pad[3 * kRansGroupBytes];

    void open(const std::uint8_t* words, const std::uint8_t* stop) {
        at = words, end = stop, in_pad = false;
        if (static_cast<std::size_t>(stop - words) < kRansGroupBytes)
            move_to_pad();
        else
            limit = stop - kRansGroupBytes;
    }

    // Call when at > limit. False: more was read than there is.
    bool refill() {
        if (!in_pad) move_to_pad();
        return at <= limit;
    }

  private:
    void move_to_pad() {
        const auto left = static_cast<std::size_t>(end - at);  // less than a group's bytes
        std::memset(pad, 0, sizeof pad);
        if (left) std::memcpy(pad, at, left);
        at = pad, end = limit = pad + left, in_pad = true;
    }
};

// One stream being encoded, from its last word to its first.
struct RansSink {
    std::uint8_t *at, *begin;
    std::uint32_t x[kRansLanes];
};

// Rows of symbols that a stream covers.
struct RansRows {
    const std::uint16_t* tables;
    std::uint8_t* symbols;  // the encoder only reads them
    std::size_t rows, cols;
};

// Each decodes all rows of `count` streams; parts[i].rows falls by i. False: a stream ended early.
using RansDecode = bool (*)(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model);
enum class RansEncoded { yes, no_room, no_code };
// Encodes all rows of one stream. no_code: a symbol has no frequency.
using RansEncode = RansEncoded (*)(RansSink& sink, const RansRows& part, const RansModel& model);

bool rans_decode_portable(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model);
RansEncoded rans_encode_portable(RansSink& sink, const RansRows& part, const RansModel& model);
// The first n lanes of a group; at <= limit.
void rans_decode_group(RansSource& source, const RansModel& model, std::size_t table, std::uint8_t* symbols,
                       std::size_t n);
// False: out of room. Symbols have been checked.
bool rans_encode_group(RansSink& sink, const RansModel& model, std::size_t table, const std::uint8_t* symbols,
                       std::size_t n);

#if defined(__x86_64__)
// Small alphabets only.
bool rans_decode_avx2(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model);
RansEncoded rans_encode_avx2(RansSink& sink, const RansRows& part, const RansModel& model);
bool rans_decode_avx512(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model);
#endif

}  // namespace lmkv
