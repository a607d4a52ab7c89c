#include "xpl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "clones.h"
#include "cpu.h"
#include "rans.h"
#include "xpl_core.h"

namespace lmkv {
namespace {

constexpr int kBits = 12;
constexpr std::size_t kAlphabet = 16, kGroup = 32;
constexpr int kAbove = 3;                             // how far offsets lie above the mean exponent
constexpr std::size_t kBlock = std::size_t{1} << 17;  // symbols that are coded together, in whole rows
constexpr std::size_t kTableBytes = kAlphabet * 12 / 8;

[[noreturn]] void refuse(const char* what) { throw std::invalid_argument(what); }

template <typename Word, int kExponent, int kMantissa>
struct Float {
    using Type = Word;
    static constexpr int mantissa = kMantissa, raw = kMantissa + 1;
    static constexpr Word mask = (Word{1} << kExponent) - 1;
    static std::uint8_t exponent(Word w) { return static_cast<std::uint8_t>(w >> kMantissa & mask); }
    static std::uint32_t rest(Word w) {
        return (static_cast<std::uint32_t>(w) >> (kExponent + kMantissa) & 1) << kMantissa |
               (static_cast<std::uint32_t>(w) & ((1u << kMantissa) - 1));
    }
    static Word join(std::uint8_t exponent, std::uint32_t rest) {
        return static_cast<Word>((rest >> kMantissa & 1) << (kExponent + kMantissa) |
                                 static_cast<std::uint32_t>(exponent & mask) << kMantissa |
                                 (rest & ((1u << kMantissa) - 1)));
    }
};

// Calls body with the Float of a type.
template <typename Body>
auto with_float(const XplFloat& type, const Body& body) {
    if (type.bytes == 2 && type.exponent == 8 && type.mantissa == 7) return body(Float<std::uint16_t, 8, 7>{});
    if (type.bytes == 2 && type.exponent == 5 && type.mantissa == 10) return body(Float<std::uint16_t, 5, 10>{});
    if (type.bytes == 4 && type.exponent == 8 && type.mantissa == 23) return body(Float<std::uint32_t, 8, 23>{});
    if (type.bytes == 1 && type.exponent == 4 && type.mantissa == 3) return body(Float<std::uint8_t, 4, 3>{});
    if (type.bytes == 1 && type.exponent == 5 && type.mantissa == 2) return body(Float<std::uint8_t, 5, 2>{});
    refuse("no such float");
}

constexpr std::size_t rest_bytes(std::size_t cols, int raw) {
    return (cols + kGroup - 1) / kGroup * (kGroup / 8) * static_cast<std::size_t>(raw);
}

// The rests of a group of 32 values: whole bytes as byte planes, the bits above them as bit planes.
template <typename F>
void put_rests(const std::uint32_t* rest, std::uint8_t* out) {
    for (int byte = 0; byte < F::raw / 8; ++byte, out += kGroup)
        for (std::size_t i = 0; i < kGroup; ++i) out[i] = static_cast<std::uint8_t>(rest[i] >> 8 * byte);
    for (int bit = F::raw / 8 * 8; bit < F::raw; ++bit, out += kGroup / 8) {
        std::uint32_t plane = 0;
        for (std::size_t i = 0; i < kGroup; ++i) plane |= (rest[i] >> bit & 1) << i;
        std::memcpy(out, &plane, sizeof plane);
    }
}

template <typename F>
void get_rests(const std::uint8_t* in, std::uint32_t* rest) {
    for (std::size_t i = 0; i < kGroup; ++i) rest[i] = 0;
    for (int byte = 0; byte < F::raw / 8; ++byte, in += kGroup)
        for (std::size_t i = 0; i < kGroup; ++i) rest[i] |= static_cast<std::uint32_t>(in[i]) << 8 * byte;
    for (int bit = F::raw / 8 * 8; bit < F::raw; ++bit, in += kGroup / 8) {
        std::uint32_t plane;
        std::memcpy(&plane, in, sizeof plane);
        for (std::uint32_t i = 0; i < kGroup; ++i) rest[i] |= (plane >> i & 1) << bit;
    }
}

// Runs of a row one after another, into a row without gaps or back.
template <typename Word, typename Move>
void each_run(const XplRows& rows, std::size_t row, Word* values, const Move& move) {
    for (std::size_t a = 0; a < rows.count0; ++a)
        for (std::size_t b = 0; b < rows.count1; ++b)
            move(values + rows.starts[row] + static_cast<std::int64_t>(a) * rows.stride0 +
                 static_cast<std::int64_t>(b) * rows.stride1);
}

// Whether a row is one piece of memory, which then needs no copy.
bool contiguous(const XplRows& rows) {
    const auto dim = static_cast<std::int64_t>(rows.dim), inner = static_cast<std::int64_t>(rows.count1) * dim;
    return (rows.count1 == 1 || rows.stride1 == dim) && (rows.count0 == 1 || rows.stride0 == inner);
}

// What a row's exponents are counted from: one for each channel, within 15 of base.
struct Offsets {
    std::uint8_t base;
    std::vector<std::uint8_t> by_channel;
};

template <typename F>
LMKV_CLONES void sum_exponents(const typename F::Type* row, std::size_t runs, std::size_t dim, std::uint32_t* sum,
                               std::uint32_t* count) {
    for (std::size_t run = 0; run < runs; ++run, row += dim)
        for (std::size_t d = 0; d < dim; ++d) {
            const std::uint8_t e = F::exponent(row[d]);
            sum[d] += e, count[d] += e != 0;
        }
}

template <typename F>
Offsets choose_offsets(const typename F::Type* row, std::size_t runs, std::size_t dim) {
    std::vector<std::uint32_t> sum(dim), count(dim);
    sum_exponents<F>(row, runs, dim, sum.data(), count.data());
    int low = 255, high = 0;
    for (std::size_t d = 0; d < dim; ++d) {
        sum[d] = count[d] ? std::min((sum[d] + count[d] / 2) / count[d] + kAbove, 255u) : 0;
        if (!count[d]) continue;
        low = std::min(low, static_cast<int>(sum[d])), high = std::max(high, static_cast<int>(sum[d]));
    }
    Offsets out{static_cast<std::uint8_t>(std::max({std::min(low, high), high - 15, 0})), {}};
    for (std::size_t d = 0; d < dim; ++d)
        out.by_channel.push_back(static_cast<std::uint8_t>(
            out.base + std::clamp(static_cast<int>(sum[d]) - out.base, 0, std::min(15, 255 - out.base))));
    return out;
}

template <typename F>
LMKV_CLONES void split_row(const typename F::Type* row, const std::uint8_t* offsets, std::size_t cols,
                           std::uint8_t* symbols, std::uint8_t* rests) {
    constexpr std::size_t group_bytes = rest_bytes(kGroup, F::raw);
    for (std::size_t c = 0; c < cols; c += kGroup, rests += group_bytes) {
        const std::size_t n = std::min(kGroup, cols - c);
        std::uint32_t rest[kGroup] = {};
        const auto one = [&](std::size_t i) {
            const std::uint8_t e = F::exponent(row[c + i]);
            const auto below = static_cast<std::uint8_t>(offsets[c + i] - e);
            symbols[c + i] = e == 0 ? kXplZero : below < kXplZero ? below : kXplEscape;
            rest[i] = F::rest(row[c + i]);
        };
        if (n == kGroup)
            for (std::size_t i = 0; i < kGroup; ++i) one(i);
        else
            for (std::size_t i = 0; i < n; ++i) one(i);
        put_rests<F>(rest, rests);
    }
}

// False: more escapes than there are.
template <typename F>
bool join_row(const std::uint8_t* symbols, const std::uint8_t* offsets, const std::uint8_t* rests, std::size_t cols,
              const std::uint8_t*& escapes, const std::uint8_t* escapes_end, typename F::Type* row) {
    constexpr std::size_t group_bytes = rest_bytes(kGroup, F::raw);
#if defined(__x86_64__)
    const bool fast = F::raw == 8 && simd() >= Simd::avx2;
#endif
    for (std::size_t c = 0; c < cols; c += kGroup, rests += group_bytes) {
#if defined(__x86_64__)
        if constexpr (F::raw == 8)
            if (fast) {
                const std::size_t done = xpl_join_avx2(symbols + c, offsets + c, rests, cols - c, row + c);
                c += done, rests += done;
                if (c == cols) break;
            }
#endif
        const std::size_t n = std::min(kGroup, cols - c);
        std::uint8_t exponent[kGroup] = {}, escaped = 0;
        const auto one = [&](std::size_t i) {
            const std::uint8_t symbol = symbols[c + i];
            exponent[i] = symbol == kXplZero ? 0 : static_cast<std::uint8_t>(offsets[c + i] - symbol);
            escaped |= symbol == kXplEscape;
        };
        if (n == kGroup)
            for (std::size_t i = 0; i < kGroup; ++i) one(i);
        else
            for (std::size_t i = 0; i < n; ++i) one(i);
        if (escaped) [[unlikely]]
            for (std::size_t i = 0; i < n; ++i)
                if (symbols[c + i] == kXplEscape) {
                    if (escapes == escapes_end) return false;
                    exponent[i] = *escapes++;
                }
        if constexpr (F::raw == 8) {
            if (n == kGroup)
                for (std::size_t i = 0; i < kGroup; ++i) row[c + i] = F::join(exponent[i], rests[i]);
            else
                for (std::size_t i = 0; i < n; ++i) row[c + i] = F::join(exponent[i], rests[i]);
        } else {
            std::uint32_t rest[kGroup];
            get_rests<F>(rests, rest);
            for (std::size_t i = 0; i < n; ++i) row[c + i] = F::join(exponent[i], rest[i]);
        }
    }
    return true;
}

// Frequencies that sum to 2^12, each at least 1, from a sample of a row's symbols.
void count_symbols(const std::uint8_t* symbols, std::size_t cols, std::uint16_t* freqs) {
    constexpr int whole = 1 << kBits, spare = whole - static_cast<int>(kAlphabet);
    const std::size_t step = cols < 4096 ? 1 : 5;  // 5 meets every channel
    std::uint32_t counts[4][kAlphabet] = {};
    std::size_t total = 0;
    for (std::size_t c = 0; c < cols; c += step) ++counts[total++ % 4][symbols[c]];
    int sum = 0;
    std::size_t largest = 0;
    for (std::size_t s = 0; s < kAlphabet; ++s) {
        const std::uint64_t count = std::uint64_t{counts[0][s]} + counts[1][s] + counts[2][s] + counts[3][s];
        freqs[s] = static_cast<std::uint16_t>(1 + count * static_cast<std::uint64_t>(spare) / total);
        sum += freqs[s];
        if (freqs[s] > freqs[largest]) largest = s;
    }
    freqs[largest] = static_cast<std::uint16_t>(freqs[largest] + whole - sum);
}

// Two frequencies of 12 bits in three bytes.
void put_table(const std::uint16_t* freqs, std::uint8_t* out) {
    for (std::size_t s = 0; s < kAlphabet; s += 2, out += 3) {
        const std::uint32_t pair = freqs[s] | static_cast<std::uint32_t>(freqs[s + 1]) << 12;
        for (int byte = 0; byte < 3; ++byte) out[byte] = static_cast<std::uint8_t>(pair >> 8 * byte);
    }
}

void get_table(const std::uint8_t* in, std::uint16_t* freqs) {
    for (std::size_t s = 0; s < kAlphabet; s += 2, in += 3) {
        const std::uint32_t pair = in[0] | in[1] << 8 | static_cast<std::uint32_t>(in[2]) << 16;
        freqs[s] = pair & 0xFFF, freqs[s + 1] = static_cast<std::uint16_t>(pair >> 12);
    }
}

std::size_t block_rows(const XplRows& rows) { return std::clamp(kBlock / rows.cols(), std::size_t{1}, rows.rows); }

// Offsets of every value of a row.
void spread(const std::vector<std::uint8_t>& by_channel, std::vector<std::uint8_t>& by_column) {
    for (std::size_t c = 0; c < by_column.size(); c += by_channel.size())
        std::memcpy(by_column.data() + c, by_channel.data(), by_channel.size());
}

class Writer {
  public:
    Writer(std::uint8_t* out, std::size_t capacity) : begin_(out), at_(out), end_(out + capacity) {}
    std::size_t room() const { return static_cast<std::size_t>(end_ - at_); }
    std::size_t written() const { return static_cast<std::size_t>(at_ - begin_); }
    // Null when there is no room.
    std::uint8_t* take(std::size_t n) { return n > room() ? nullptr : std::exchange(at_, at_ + n); }

  private:
    std::uint8_t *begin_, *at_, *end_;
};

class Reader {
  public:
    Reader(const std::uint8_t* src, std::size_t nbytes) : begin_(src), at_(src), end_(src + nbytes) {}
    std::size_t taken() const { return static_cast<std::size_t>(at_ - begin_); }
    const std::uint8_t* take(std::size_t n) {
        if (n > static_cast<std::size_t>(end_ - at_)) refuse("a truncated xpl stream");
        return std::exchange(at_, at_ + n);
    }
    std::size_t size() {
        const std::uint8_t* const b = take(4);
        return b[0] | b[1] << 8 | b[2] << 16 | static_cast<std::size_t>(b[3]) << 24;
    }

  private:
    const std::uint8_t *begin_, *at_, *end_;
};

void put_size(std::uint8_t* at, std::size_t n) {
    for (int byte = 0; byte < 4; ++byte) at[byte] = static_cast<std::uint8_t>(n >> 8 * byte);
}

template <typename F>
std::size_t encode(const typename F::Type* values, const XplRows& rows, std::uint8_t* out, std::size_t capacity) {
    using Word = typename F::Type;
    const std::size_t cols = rows.cols(), runs = rows.count0 * rows.count1, most = block_rows(rows);
    const bool whole = contiguous(rows);
    std::vector<Word> copy(whole ? 0 : cols);
    std::vector<std::uint8_t> symbols(most * cols), by_column(cols), escapes;
    std::vector<std::uint16_t> freqs(most * kAlphabet), tables(most);
    Writer writer(out, capacity);
    for (std::size_t first = 0; first < rows.rows; first += most) {
        const std::size_t n = std::min(most, rows.rows - first);
        std::uint8_t* const heads = writer.take(n * (1 + (rows.dim + 1) / 2 + kTableBytes));
        std::uint8_t* const rests = writer.take(n * rest_bytes(cols, F::raw));
        std::uint8_t* const size = writer.take(4);
        if (!heads || !rests || !size) return 0;
        escapes.clear();
        std::uint8_t* head = heads;
        for (std::size_t r = 0; r < n; ++r) {
            const Word* row = values + rows.starts[first + r];
            if (!whole) {
                Word* to = copy.data();
                each_run(rows, first + r, values, [&](const Word* run) {
                    std::memcpy(to, run, rows.dim * sizeof(Word));
                    to += rows.dim;
                });
                row = copy.data();
            }
            const Offsets offsets = choose_offsets<F>(row, runs, rows.dim);
            spread(offsets.by_channel, by_column);
            std::uint8_t* const mine = &symbols[r * cols];
            split_row<F>(row, by_column.data(), cols, mine, rests + r * rest_bytes(cols, F::raw));
            count_symbols(mine, cols, &freqs[r * kAlphabet]);
            if (std::count(mine, mine + cols, kXplEscape))
                for (std::size_t c = 0; c < cols; ++c)
                    if (mine[c] == kXplEscape) escapes.push_back(F::exponent(row[c]));
            tables[r] = static_cast<std::uint16_t>(r);
            *head++ = offsets.base;
            for (std::size_t d = 0; d < rows.dim; d += 2) {
                const int high = d + 1 < rows.dim ? offsets.by_channel[d + 1] - offsets.base : 0;
                *head++ = static_cast<std::uint8_t>((offsets.by_channel[d] - offsets.base) | high << 4);
            }
            put_table(&freqs[r * kAlphabet], head);
            head += kTableBytes;
        }
        std::uint8_t* const kept = writer.take(escapes.size());
        std::uint8_t* const coded_size = writer.take(4);
        if (!kept || !coded_size) return 0;
        if (!escapes.empty()) std::memcpy(kept, escapes.data(), escapes.size());
        put_size(size, escapes.size());
        const RansModel model(freqs.data(), n, kAlphabet, kBits);
        std::uint8_t* const coded = writer.take(0);
        const std::size_t nbytes = rans_encode(symbols.data(), n, cols, tables.data(), model, coded, writer.room());
        if (!nbytes || nbytes > UINT32_MAX || !writer.take(nbytes)) return 0;
        put_size(coded_size, nbytes);
    }
    return writer.written();
}

template <typename F>
std::size_t decode(const std::uint8_t* src, std::size_t nbytes, const XplRows& rows, typename F::Type* values) {
    using Word = typename F::Type;
    const std::size_t cols = rows.cols(), most = block_rows(rows), each = rest_bytes(cols, F::raw);
    const bool whole = contiguous(rows);
    std::vector<Word> copy(whole ? 0 : cols);
    std::vector<std::uint8_t> symbols(most * cols), by_column(cols), by_channel(rows.dim);
    std::vector<std::uint16_t> freqs(most * kAlphabet), tables(most);
    Reader reader(src, nbytes);
    for (std::size_t first = 0; first < rows.rows; first += most) {
        const std::size_t n = std::min(most, rows.rows - first), head_bytes = 1 + (rows.dim + 1) / 2 + kTableBytes;
        const std::uint8_t* heads = reader.take(n * head_bytes);
        const std::uint8_t* rests = reader.take(n * each);
        const std::size_t escape_count = reader.size();
        const std::uint8_t* escapes = reader.take(escape_count);
        const std::uint8_t* const escapes_end = escapes + escape_count;
        const std::size_t coded_bytes = reader.size();
        const std::uint8_t* const coded = reader.take(coded_bytes);
        for (std::size_t r = 0; r < n; ++r) {
            get_table(heads + (r + 1) * head_bytes - kTableBytes, &freqs[r * kAlphabet]);
            tables[r] = static_cast<std::uint16_t>(r);
        }
        const RansModel model(freqs.data(), n, kAlphabet, kBits);
        rans_decode(coded, coded_bytes, tables.data(), model, symbols.data(), n, cols);
        for (std::size_t r = 0; r < n; ++r, heads += head_bytes, rests += each) {
            for (std::size_t d = 0; d < rows.dim; ++d)
                by_channel[d] = static_cast<std::uint8_t>(heads[0] + (heads[1 + d / 2] >> d % 2 * 4 & 15));
            spread(by_channel, by_column);
            Word* const row = whole ? values + rows.starts[first + r] : copy.data();
            if (!join_row<F>(&symbols[r * cols], by_column.data(), rests, cols, escapes, escapes_end, row))
                refuse("a corrupt xpl stream");
            if (whole) continue;
            const Word* from = copy.data();
            each_run(rows, first + r, values, [&](Word* run) {
                std::memcpy(run, from, rows.dim * sizeof(Word));
                from += rows.dim;
            });
        }
        if (escapes != escapes_end) refuse("a corrupt xpl stream");
    }
    return reader.taken();
}

}  // namespace

void xpl_check(const XplRows& rows, std::size_t values) {
    constexpr std::size_t most = std::size_t{1} << 40;
    std::size_t size = 1;
    for (const std::size_t each : {rows.rows, rows.count0, rows.count1, rows.dim}) {
        if (each < 1 || each > most / size) refuse("the rows' sizes are out of range");
        size *= each;
    }
    if (values > most || size > values) refuse("the rows do not fit the buffer");
    const auto stop = static_cast<std::int64_t>(values);
    const auto span = [&](std::size_t count, std::int64_t stride) {
        if (count == 1) return std::int64_t{0};
        if (stride < 1) refuse("strides must be positive");
        if (static_cast<std::int64_t>(count - 1) > stop / stride) refuse("a row leaves the buffer");
        return static_cast<std::int64_t>(count - 1) * stride;
    };
    const std::int64_t length =
        span(rows.count0, rows.stride0) + span(rows.count1, rows.stride1) + static_cast<std::int64_t>(rows.dim);
    for (std::size_t r = 0; r < rows.rows; ++r)
        if (rows.starts[r] < 0 || rows.starts[r] > stop - length) refuse("a row leaves the buffer");
}

std::size_t xpl_encode(const std::uint8_t* values, const XplFloat& type, const XplRows& rows, std::uint8_t* out,
                       std::size_t capacity) {
    return with_float(type, [&](auto f) {
        using F = decltype(f);
        return encode<F>(reinterpret_cast<const typename F::Type*>(values), rows, out, capacity);
    });
}

std::size_t xpl_decode(const std::uint8_t* src, std::size_t nbytes, const XplFloat& type, const XplRows& rows,
                       std::uint8_t* values) {
    return with_float(type, [&](auto f) {
        using F = decltype(f);
        return decode<F>(src, nbytes, rows, reinterpret_cast<typename F::Type*>(values));
    });
}

}  // namespace lmkv
