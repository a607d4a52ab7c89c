// A stream of coefficients, as lmkv/codec/coefficients.py lays it out, back to rows.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "klt.h"
#include "rans.h"

namespace lmkv {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

// What is left of a stream, taken from the front. Numbers are little-endian.
struct Reader {
    const std::uint8_t* data;
    std::size_t size;

    const std::uint8_t* cut(std::size_t nbytes) {
        if (nbytes > size) refuse("the coefficients are cut short");
        const std::uint8_t* const front = data;
        data += nbytes, size -= nbytes;
        return front;
    }

    std::uint32_t number(int bytes) {
        const std::uint8_t* const from = cut(static_cast<std::size_t>(bytes));
        std::uint32_t value = 0;
        for (int i = 0; i < bytes; ++i) value |= std::uint32_t{from[i]} << 8 * i;
        return value;
    }
};

// What a thread keeps between calls.
struct Scratch {
    std::vector<std::uint32_t> rows;
    std::vector<std::uint16_t> tables;
    std::vector<std::uint8_t> shifts, symbols, ids;
    std::vector<std::int16_t> differences;
};

// q[rows][cols] of rows with these ids: `coded` bytes of rANS, low bits, and escapes up to the end.
void unpack(Reader src, const std::uint8_t* ids, std::size_t rows, std::size_t cols, std::size_t coded,
            const CoefficientIds& known, Scratch& scratch, std::int16_t* q) {
    scratch.rows.clear(), scratch.tables.clear(), scratch.shifts.clear();
    std::size_t bits = 0;
    for (std::size_t r = 0; r < rows; ++r)
        if (ids[r]) {
            scratch.rows.push_back(static_cast<std::uint32_t>(r));
            scratch.tables.push_back(known.tables[ids[r]]);
            scratch.shifts.push_back(known.shifts[ids[r]]);
            bits += known.shifts[ids[r]];
        }
    const std::uint8_t* const raw = src.cut(coded);
    const std::uint8_t* const low = src.cut(bits * ((cols + 7) / 8));
    const CoefficientRows which{scratch.rows.data(), scratch.shifts.data(), scratch.rows.size(), cols};
    if (!which.count && (coded || src.size)) refuse("bytes after the coefficients");
    if (src.size % 2) refuse("half an escape");
    scratch.symbols.resize(std::max(scratch.symbols.size(), which.count * cols));
    if (which.count)
        rans_decode(raw, coded, scratch.tables.data(), *known.model, scratch.symbols.data(), which.count, cols);
    if (!coefficients_join(scratch.symbols.data(), which, low, src.data, src.size / 2, q, rows))
        refuse("more or fewer escapes than escaped symbols");
}

}  // namespace

void coefficients_decode(const std::uint8_t* src, std::size_t nbytes, const CoefficientIds& known,
                         const std::uint8_t* defaults, std::int16_t* q, std::size_t rows, std::size_t cols) {
    thread_local Scratch scratch;
    Reader all{src, nbytes};
    const std::uint32_t base = all.number(2), zero_and_own = all.number(2), first = all.number(4),
                        second = all.number(4);
    const std::uint8_t own = zero_and_own & 0xFF;
    if (zero_and_own >> 8 || base >= known.count || own >= known.count) refuse("not the front of coefficients");
    Reader front{all.cut(first), first};
    const std::uint32_t coded = front.number(4);
    scratch.differences.resize(rows);
    unpack(front, &own, 1, rows, coded, known, scratch, scratch.differences.data());
    scratch.ids.resize(rows);
    for (std::size_t r = 0; r < rows; ++r) {
        const int id = scratch.differences[r] + static_cast<int>(defaults ? defaults[r] : base);
        if (id < 0 || static_cast<std::size_t>(id) >= known.count) refuse("a row id that is none");
        scratch.ids[r] = static_cast<std::uint8_t>(id);
    }
    unpack(all, scratch.ids.data(), rows, cols, second, known, scratch, q);
}

}  // namespace lmkv
