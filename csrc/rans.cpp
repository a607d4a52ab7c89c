#include "rans.h"

#include <algorithm>
#include <stdexcept>

#include "cpu.h"
#include "rans_core.h"

namespace lmkv {
namespace {

constexpr std::uint8_t kVersion = 0xA1;
constexpr std::size_t kHead = 2, kCount = 4, kStates = 4 * kRansLanes;

[[noreturn]] void refuse(const char* what) { throw std::invalid_argument(what); }

void store32(std::uint8_t* at, std::uint32_t value) {
    for (int i = 0; i < 4; ++i) at[i] = static_cast<std::uint8_t>(value >> 8 * i);
}

std::uint32_t load32(const std::uint8_t* at) { return load_word(at) | load_word(at + 2) << 16; }

// Rows of stream i of count: all but the last ones have the same number, none has 0 but by lack of rows.
RansRows rows_of(std::size_t i, std::size_t count, const std::uint16_t* tables, std::uint8_t* symbols, std::size_t rows,
                 std::size_t cols) {
    const std::size_t each = (rows + count - 1) / count, first = std::min(rows, i * each);
    return {tables + first, symbols + first * cols, std::min(each, rows - first), cols};
}

void check_tables(const std::uint16_t* tables, std::size_t rows, std::size_t cols, const RansModel& model) {
    if (rows == 0 || cols == 0) refuse("there must be a symbol");
    if (*std::max_element(tables, tables + rows) >= model.tables) refuse("a row's table number is too high");
}

RansDecode decoder(const RansModel& model) {
#if defined(__x86_64__)
    if (model.small() && simd() >= Simd::avx512) return rans_decode_avx512;
    if (model.small() && simd() >= Simd::avx2) return rans_decode_avx2;
#endif
    (void)model;
    return rans_decode_portable;
}

RansEncode encoder(const RansModel& model) {
#if defined(__x86_64__)
    if (model.small() && simd() >= Simd::avx2) return rans_encode_avx2;
#endif
    (void)model;
    return rans_encode_portable;
}

}  // namespace

void rans_decode_group(RansSource& source, const RansModel& model, std::size_t table, std::uint8_t* symbols,
                       std::size_t n) {
    const int bits = model.bits;
    const bool small = model.small();
    const RansAlias* const alias = small ? &model.alias[table] : nullptr;
    const std::uint32_t* const slots = small ? nullptr : &model.slots[table << bits];
    for (std::size_t turn = 0; turn < kRansLanes; ++turn) {
        const std::size_t lane = rans_lane(turn);
        if (lane >= n) continue;
        std::uint32_t x = source.x[lane], freq, offset;
        const std::uint32_t slot = x & ((1u << bits) - 1);
        if (small) {
            const std::uint32_t bucket = slot >> (bits - 4), within = slot & ((1u << (bits - 4)) - 1);
            const bool own = within < alias->split[bucket];
            const std::uint32_t symbol = own ? bucket : alias->other[bucket];
            const std::uint32_t base = own ? 0 : alias->base_low[bucket] | alias->base_high[bucket] << 8;
            freq = alias->freq_low[symbol] | alias->freq_high[symbol] << 8;
            offset = (within + base) & 0xFFFF;
            symbols[lane] = static_cast<std::uint8_t>(symbol);
        } else {
            const std::uint32_t entry = slots[slot];
            freq = (entry >> 8 & 0xFFF) + 1, offset = entry >> 20;
            symbols[lane] = static_cast<std::uint8_t>(entry);
        }
        x = freq * (x >> bits) + offset;
        if (x < kRansLow) {
            x = x << 16 | load_word(source.at);
            source.at += 2;
        }
        source.x[lane] = x;
    }
}

bool rans_decode_portable(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model) {
    for (std::size_t i = 0; i < count; ++i) {
        std::uint8_t* symbols = parts[i].symbols;
        for (std::size_t r = 0; r < parts[i].rows; ++r)
            for (std::size_t left = parts[i].cols; left;) {
                if (sources[i].at > sources[i].limit && !sources[i].refill()) return false;
                const std::size_t n = std::min(left, kRansLanes);
                rans_decode_group(sources[i], model, parts[i].tables[r], symbols, n);
                symbols += n, left -= n;
            }
    }
    return true;
}

bool rans_encode_group(RansSink& sink, const RansModel& model, std::size_t table, const std::uint8_t* symbols,
                       std::size_t n) {
    const RansModel::Encoder& encoder = model.encoder();
    const int bits = model.bits;
    for (std::size_t turn = kRansLanes; turn-- > 0;) {
        const std::size_t lane = rans_lane(turn);
        if (lane >= n) continue;
        const std::size_t i = table * model.alphabet + symbols[lane];
        const std::uint32_t freq = model.freqs[i];
        std::uint32_t x = sink.x[lane];
        if (x >> (32 - bits) >= freq) {
            if (sink.at - sink.begin < 2) return false;
            sink.at -= 2;
            sink.at[0] = static_cast<std::uint8_t>(x), sink.at[1] = static_cast<std::uint8_t>(x >> 8);
            x >>= 16;
        }
        auto quotient = static_cast<std::uint32_t>(std::uint64_t{x} * encoder.reciprocal[i] >> 32);  // or one less
        std::uint32_t rest = x - quotient * freq;
        if (rest >= freq) ++quotient, rest -= freq;
        const std::uint32_t place = encoder.start[i] + rest;
        sink.x[lane] = quotient << bits | (model.small() ? encoder.slot_of[(table << bits) + place] : place);
    }
    return true;
}

RansEncoded rans_encode_portable(RansSink& sink, const RansRows& part, const RansModel& model) {
    const std::uint8_t* end = part.symbols + part.rows * part.cols;
    for (std::size_t r = part.rows; r-- > 0;) {
        std::uint8_t codable[256] = {};
        for (std::size_t s = 0; s < model.alphabet; ++s)
            codable[s] = model.freqs[part.tables[r] * model.alphabet + s] != 0;
        if (!std::all_of(end - part.cols, end, [&](std::uint8_t symbol) { return codable[symbol] != 0; }))
            return RansEncoded::no_code;
        for (std::size_t left = part.cols; left;) {
            const std::size_t n = left % kRansLanes ? left % kRansLanes : kRansLanes;
            end -= n, left -= n;
            if (!rans_encode_group(sink, model, part.tables[r], end, n)) return RansEncoded::no_room;
        }
    }
    return RansEncoded::yes;
}

std::size_t rans_encode(const std::uint8_t* symbols, std::size_t rows, std::size_t cols, const std::uint16_t* tables,
                        const RansModel& model, std::uint8_t* out, std::size_t capacity, std::size_t streams) {
    check_tables(tables, rows, cols, model);
    // A second stream costs 132 bytes; where nothing else runs on the core, its decoder's chains overlap the first
    // one's.
    if (streams == 0) streams = rows * cols >= (std::size_t{1} << 17) ? 2 : 1;
    streams = std::min(streams, rows);
    if (streams > kRansMaxStreams) refuse("too many streams");
    const std::size_t head = kHead + kCount * streams;
    if (capacity < head) return 0;
    std::uint8_t* const first = out + head;
    std::uint8_t* at = out + capacity;
    for (std::size_t i = streams; i-- > 0;) {
        RansSink sink{at, first, {}};
        std::fill(sink.x, sink.x + kRansLanes, kRansLow);
        const RansRows part = rows_of(i, streams, tables, const_cast<std::uint8_t*>(symbols), rows, cols);
        const RansEncoded encoded = encoder(model)(sink, part, model);
        if (encoded == RansEncoded::no_code) refuse("a symbol has no frequency in its row's table");
        if (encoded == RansEncoded::no_room) return 0;
        const auto words = static_cast<std::size_t>(at - sink.at) / 2;
        if (words > UINT32_MAX || static_cast<std::size_t>(sink.at - first) < kStates) return 0;
        at = sink.at - kStates;
        for (std::size_t lane = 0; lane < kRansLanes; ++lane) store32(at + 4 * lane, sink.x[lane]);
        store32(out + kHead + kCount * i, static_cast<std::uint32_t>(words));
    }
    out[0] = kVersion, out[1] = static_cast<std::uint8_t>(streams);
    const auto body = static_cast<std::size_t>(out + capacity - at);
    std::memmove(first, at, body);
    return head + body;
}

void rans_decode(const std::uint8_t* src, std::size_t nbytes, const std::uint16_t* tables, const RansModel& model,
                 std::uint8_t* symbols, std::size_t rows, std::size_t cols) {
    check_tables(tables, rows, cols, model);
    if (nbytes < kHead) refuse("a truncated rANS stream");
    const std::size_t streams = src[1];
    if (src[0] != kVersion || streams == 0 || streams > kRansMaxStreams || streams > rows)
        refuse("not a rANS stream of this version");
    const std::size_t head = kHead + kCount * streams;
    if (nbytes < head) refuse("a truncated rANS stream");
    RansSource sources[kRansMaxStreams];
    RansRows parts[kRansMaxStreams];
    std::size_t at = head;
    for (std::size_t i = 0; i < streams; ++i) {
        const std::size_t words = load32(src + kHead + kCount * i);
        if (nbytes - at < kStates || (nbytes - at - kStates) / 2 < words) refuse("a truncated rANS stream");
        for (std::size_t lane = 0; lane < kRansLanes; ++lane) {
            sources[i].x[lane] = load32(src + at + 4 * lane);
            if (sources[i].x[lane] < kRansLow) refuse("a corrupt rANS stream");
        }
        at += kStates;
        sources[i].open(src + at, src + at + 2 * words);
        at += 2 * words;
        parts[i] = rows_of(i, streams, tables, symbols, rows, cols);
    }
    if (at != nbytes) refuse("bytes after the end of a rANS stream");
    bool whole = decoder(model)(sources, parts, streams, model);
    for (std::size_t i = 0; i < streams; ++i) {
        whole = whole && sources[i].at == sources[i].end;
        for (const std::uint32_t x : sources[i].x) whole = whole && x == kRansLow;
    }
    if (!whole) refuse("a corrupt rANS stream");
}

}  // namespace lmkv
