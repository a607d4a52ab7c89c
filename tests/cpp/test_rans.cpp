// The entropy coder and the exact codec under the sanitizers: what fits, what is cut off, what is damaged.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "rans.h"
#include "rans_core.h"
#include "xpl.h"

namespace lmkv {
bool rans_decode_x16_anywhere(RansSource* sources, const RansRows* parts, std::size_t count, const RansModel& model);
}

namespace {

using Bytes = std::vector<std::uint8_t>;

struct Case {
    std::size_t rows, cols, alphabet;
    int bits;
    std::vector<std::uint16_t> freqs, tables;
    Bytes symbols;
};

// Two tables, one of them with most of its weight on one symbol.
Case make(Random& random, std::size_t rows, std::size_t cols, std::size_t alphabet, int bits) {
    Case out{rows, cols, alphabet, bits, std::vector<std::uint16_t>(2 * alphabet, 1), {}, Bytes(rows * cols)};
    const auto spare = (1 << bits) - static_cast<int>(alphabet);
    out.freqs[0] = static_cast<std::uint16_t>(1 + spare);
    for (int i = 0; i < spare; ++i) ++out.freqs[alphabet + static_cast<std::size_t>(pick(random, 0, alphabet - 1))];
    for (std::size_t r = 0; r < rows; ++r) {
        out.tables.push_back(static_cast<std::uint16_t>(pick(random, 0, 1)));
        for (std::size_t c = 0; c < cols; ++c) {
            const bool usual = out.tables[r] == 0 && pick(random, 0, 9) > 0;
            out.symbols[r * cols + c] = static_cast<std::uint8_t>(usual ? 0 : pick(random, 0, alphabet - 1));
        }
    }
    return out;
}

Bytes encode(const Case& c, const lmkv::RansModel& model, std::size_t room, std::size_t streams) {
    Bytes out(room);
    out.resize(lmkv::rans_encode(c.symbols.data(), c.rows, c.cols, c.tables.data(), model, out.data(), room, streams));
    return out;
}

// Exactly the bytes there are, so that a sanitizer sees the first one read beyond them. Empty: refused.
Bytes decode(const Bytes& stream, const Case& c, const lmkv::RansModel& model) {
    Bytes exact(stream), symbols(c.symbols.size());
    exact.shrink_to_fit();
    try {
        lmkv::rans_decode(exact.data(), exact.size(), c.tables.data(), model, symbols.data(), c.rows, c.cols);
    } catch (const std::invalid_argument&) {
        return {};
    }
    return symbols;
}

void test_round_trips() {
    Random random(1);
    for (int i = 0; i < 300; ++i) {
        const std::size_t alphabets[] = {2, 15, 16, 17, 200};
        const Case c =
            make(random, static_cast<std::size_t>(pick(random, 1, 9)), static_cast<std::size_t>(pick(random, 1, 200)),
                 alphabets[pick(random, 0, 4)], static_cast<int>(pick(random, 8, 12)));
        const lmkv::RansModel model(c.freqs.data(), 2, c.alphabet, c.bits);
        const Bytes stream = encode(c, model, 2 * c.symbols.size() + 2000, i % 3 < 2 ? 1 : c.rows);
        CHECK(decode(stream, c, model) == c.symbols);
        CHECK(encode(c, model, stream.size(), stream[1]) == stream);
        CHECK(encode(c, model, stream.size() - 1, stream[1]).empty());
    }
}

void test_damage() {
    Random random(2);
    for (const std::size_t alphabet : {16u, 40u}) {
        const Case c = make(random, 6, 70, alphabet, 10);
        const lmkv::RansModel model(c.freqs.data(), 2, c.alphabet, c.bits);
        const Bytes stream = encode(c, model, 4000, 2);
        for (std::size_t length = 0; length < stream.size(); ++length)
            CHECK(decode({stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(length)}, c, model).empty());
        for (std::size_t at = 0; at < stream.size(); ++at) {
            Bytes bad = stream;
            bad[at] = static_cast<std::uint8_t>(bad[at] ^ pick(random, 1, 255));
            decode(bad, c, model);
            CHECK(decode(stream, c, model) == c.symbols);
        }
        for (int i = 0; i < 2000; ++i) {
            Bytes noise(static_cast<std::size_t>(pick(random, 0, 700)));
            for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
            if (noise.size() > 1) noise[0] = stream[0], noise[1] = static_cast<std::uint8_t>(pick(random, 1, 3));
            CHECK(decode(noise, c, model).empty());
        }
    }
}

#if defined(__x86_64__)
void test_sixteen_lanes() {
    if (lmkv::simd() < lmkv::Simd::avx2) return;
    Random random(3);
    for (int i = 0; i < 100; ++i) {
        const Case c =
            make(random, static_cast<std::size_t>(pick(random, 1, 5)), static_cast<std::size_t>(pick(random, 1, 200)),
                 i % 2 ? 16 : 7, static_cast<int>(pick(random, 8, 12)));
        const lmkv::RansModel model(c.freqs.data(), 2, c.alphabet, c.bits);
        const Bytes stream = encode(c, model, 2 * c.symbols.size() + 2000, 1);
        lmkv::RansSource source;
        std::memcpy(source.x, stream.data() + 6, sizeof source.x);
        source.open(stream.data() + 6 + sizeof source.x, stream.data() + stream.size());
        Bytes symbols(c.symbols.size());
        const lmkv::RansRows part{c.tables.data(), symbols.data(), c.rows, c.cols};
        CHECK(lmkv::rans_decode_x16_anywhere(&source, &part, 1, model));
        CHECK(symbols == c.symbols);
        CHECK(source.at == source.end);
    }
}
#endif

void test_exact_codec() {
    Random random(4);
    for (const lmkv::XplFloat type : {lmkv::XplFloat{2, 8, 7}, {2, 5, 10}, {4, 8, 23}, {1, 4, 3}, {1, 5, 2}}) {
        const auto bytes = static_cast<std::size_t>(type.bytes);
        const std::size_t dim = static_cast<std::size_t>(pick(random, 1, 70)), runs = 40, values = 3 * runs * dim;
        std::vector<std::uint32_t> memory((values * bytes + 3) / 4);  // aligned for every type
        auto* const raw = reinterpret_cast<std::uint8_t*>(memory.data());
        for (std::size_t i = 0; i < values * bytes; ++i)
            raw[i] = static_cast<std::uint8_t>(pick(random, 0, 9) ? 60 + pick(random, 0, 3) : random());
        // Three rows whose runs lie between each other.
        const std::vector<std::int64_t> starts{0, static_cast<std::int64_t>(dim), static_cast<std::int64_t>(2 * dim)};
        const auto step = static_cast<std::int64_t>(3 * dim);
        const lmkv::XplRows rows{starts.data(), 3, 4, runs / 4, dim, 10 * step, step};
        lmkv::xpl_check(rows, values);
        Bytes stream(8 * values * bytes + 4000);
        stream.resize(lmkv::xpl_encode(raw, type, rows, stream.data(), stream.size()));
        stream.shrink_to_fit();
        std::vector<std::uint32_t> back(memory.size());
        auto* const out = reinterpret_cast<std::uint8_t*>(back.data());
        CHECK(lmkv::xpl_decode(stream.data(), stream.size(), type, rows, out) == stream.size());
        CHECK(std::memcmp(raw, out, values * bytes) == 0);
        for (std::size_t i = 0; i < 400; ++i) {
            Bytes bad(stream.begin(),
                      stream.end() - static_cast<std::ptrdiff_t>(i % 2 * std::min(i, stream.size() - 1)));
            bad[static_cast<std::size_t>(pick(random, 0, bad.size() - 1))] ^= 0x5A;
            bad.shrink_to_fit();
            try {
                lmkv::xpl_decode(bad.data(), bad.size(), type, rows, out);
                CHECK(i % 2 == 0);
            } catch (const std::invalid_argument&) {
                CHECK(true);
            }
        }
    }
}

}  // namespace

void test_rans() {
    for_each_simd([] {
        test_round_trips();
        test_damage();
        test_exact_codec();
    });
#if defined(__x86_64__)
    test_sixteen_lanes();
#endif
}
