// The inverse transform and the rows of coefficients against plain loops, in buffers of the exact size, so that the
// sanitizers see every read and write beside them.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "klt.h"
#include "rans.h"

namespace {

using namespace lmkv;

std::vector<std::int16_t> numbers(Random& random, std::size_t n, int most, double zeros) {
    std::vector<std::int16_t> out(n);
    for (auto& each : out)
        each = static_cast<std::int16_t>(pick(random, 0, 999) < 1000 * zeros ? 0 : pick(random, -most - 1, most));
    return out;
}

void test_transform(Random& random) {
    for (const int most : {1, 40, 32767}) {
        const auto channels = static_cast<std::size_t>(pick(random, 1, 200));
        const auto kept = static_cast<std::size_t>(pick(random, 1, 400));
        const auto tokens = static_cast<std::size_t>(pick(random, 1, 40));
        const auto matrix = numbers(random, channels * kept, 4095, 0), q = numbers(random, kept * tokens, most, 0.7);
        const std::vector<float> scale(channels, 0.25f), mean(channels, 3.0f);
        std::vector<float> x(tokens * channels);
        KltMatrix(matrix.data(), channels, kept)
            .transform(q.data(), tokens, tokens, scale.data(), mean.data(), x.data());
        bool same = true;
        for (std::size_t t = 0; t < tokens; ++t)
            for (std::size_t c = 0; c < channels; ++c) {
                std::int64_t sum = 0;
                for (std::size_t k = 0; k < kept; ++k) sum += std::int64_t{matrix[c * kept + k]} * q[k * tokens + t];
                const float product = static_cast<float>(sum) * 0.25f;
                same = same && x[t * channels + c] == product + 3.0f;
            }
        CHECK(same);
    }
}

void test_rows(Random& random) {
    const std::size_t count = 5, all = 9;
    const auto cols = static_cast<std::size_t>(pick(random, 1, 70));
    const auto q = numbers(random, all * cols, 300, 0.5);
    const std::uint32_t rows[count] = {0, 2, 3, 7, 8};
    std::uint8_t shifts[count];
    std::size_t bits = 0;
    for (auto& each : shifts) bits += each = static_cast<std::uint8_t>(pick(random, 0, 8));
    const std::uint16_t tables[count] = {0, 1, 0, 1, 0};
    std::uint16_t freqs[32] = {};
    std::fill_n(freqs, 16, std::uint16_t{64});
    std::fill_n(freqs + 19, 9, std::uint16_t{100});
    std::vector<std::uint8_t> symbols(count * cols), low(bits * ((cols + 7) / 8));
    std::vector<std::int16_t> escapes(count * cols), back(all * cols, 7);
    const CoefficientRows which{rows, shifts, count, cols};
    const std::size_t n =
        coefficients_split(q.data(), which, tables, freqs, symbols.data(), low.data(), escapes.data());
    std::vector<std::uint8_t> bytes(2 * n);
    if (n) std::memcpy(bytes.data(), escapes.data(), 2 * n);
    CHECK(coefficients_join(symbols.data(), which, low.data(), bytes.data(), n, back.data(), all));
    for (std::size_t r = 0; r < all; ++r) {
        const bool named = std::find(rows, rows + count, r) != rows + count;
        const bool same = named ? std::equal(q.begin() + static_cast<std::ptrdiff_t>(r * cols),
                                             q.begin() + static_cast<std::ptrdiff_t>((r + 1) * cols),
                                             back.begin() + static_cast<std::ptrdiff_t>(r * cols))
                                : std::count(back.begin() + static_cast<std::ptrdiff_t>(r * cols),
                                             back.begin() + static_cast<std::ptrdiff_t>((r + 1) * cols),
                                             0) == static_cast<std::ptrdiff_t>(cols);
        CHECK(same);
    }
    CHECK(!coefficients_join(symbols.data(), which, low.data(), bytes.data(), n + 1, back.data(), all));
    if (n) CHECK(!coefficients_join(symbols.data(), which, low.data(), bytes.data(), n - 1, back.data(), all));
}

using Bytes = std::vector<std::uint8_t>;

void put(Bytes& out, std::size_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out.push_back(static_cast<std::uint8_t>(value >> 8 * i));
}

// Rows with these ids: bytes of rANS, then low bits and escapes.
std::pair<Bytes, Bytes> pieces(const std::vector<std::int16_t>& q, std::size_t cols, const Bytes& ids,
                               const CoefficientIds& known) {
    std::vector<std::uint32_t> rows;
    std::vector<std::uint16_t> tables;
    Bytes shifts;
    std::size_t bits = 0;
    for (std::size_t r = 0; r < ids.size(); ++r)
        if (ids[r]) {
            rows.push_back(static_cast<std::uint32_t>(r));
            tables.push_back(known.tables[ids[r]]);
            shifts.push_back(known.shifts[ids[r]]);
            bits += shifts.back();
        }
    if (rows.empty()) return {};
    Bytes symbols(rows.size() * cols), low(bits * ((cols + 7) / 8)), coded(2 * symbols.size() + 2000);
    std::vector<std::int16_t> escapes(symbols.size());
    const std::size_t n = coefficients_split(q.data(), {rows.data(), shifts.data(), rows.size(), cols}, tables.data(),
                                             known.model->freqs.data(), symbols.data(), low.data(), escapes.data());
    coded.resize(
        rans_encode(symbols.data(), rows.size(), cols, tables.data(), *known.model, coded.data(), coded.size()));
    for (std::size_t i = 0; i < n; ++i) put(low, static_cast<std::uint16_t>(escapes[i]), 2);
    return {coded, low};
}

void test_stream(Random& random) {
    std::vector<std::uint16_t> freqs(32, 16);
    freqs[0] = freqs[16 + 7] = 784;
    const RansModel model(freqs.data(), 2, 16, 10);
    const std::uint16_t tables[] = {0, 0, 1, 1};
    const std::uint8_t shifts[] = {0, 0, 0, 5};
    const CoefficientIds known{tables, shifts, 4, &model};
    const auto rows = static_cast<std::size_t>(pick(random, 1, 12)),
               cols = static_cast<std::size_t>(pick(random, 1, 70));
    Bytes ids(rows), defaults(rows);
    auto q = numbers(random, rows * cols, 300, 0.5);
    std::vector<std::int16_t> differences(rows), back(rows * cols, 7);
    for (std::size_t r = 0; r < rows; ++r) {
        ids[r] = static_cast<std::uint8_t>(pick(random, 0, 3)),
        defaults[r] = static_cast<std::uint8_t>(pick(random, 0, 3));
        differences[r] = static_cast<std::int16_t>(ids[r] - defaults[r]);
        if (!ids[r]) std::fill_n(q.begin() + static_cast<std::ptrdiff_t>(r * cols), cols, std::int16_t{0});
    }
    const auto [of_ids, ids_rest] = pieces(differences, rows, {1}, known);
    const auto [coded, rest] = pieces(q, cols, ids, known);
    Bytes stream;
    put(stream, 0, 2), put(stream, 1, 2), put(stream, 4 + of_ids.size() + ids_rest.size(), 4),
        put(stream, coded.size(), 4);
    put(stream, of_ids.size(), 4);
    for (const auto* each : {&of_ids, &ids_rest, &coded, &rest})
        stream.insert(stream.end(), each->begin(), each->end());
    const auto decodes = [&](const Bytes& bytes) {
        const Bytes exact(bytes);  // of just this size
        try {
            coefficients_decode(exact.data(), exact.size(), known, defaults.data(), back.data(), rows, cols);
        } catch (const std::invalid_argument&) {
            return false;
        }
        return true;
    };
    CHECK(decodes(stream) && back == q);
    for (std::size_t n = 0; n < stream.size(); ++n)
        CHECK(!decodes(Bytes(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(n))));
    for (int i = 0; i < 200; ++i) {
        Bytes wrong(stream);
        wrong[static_cast<std::size_t>(pick(random, 0, static_cast<std::int64_t>(wrong.size()) - 1))] ^=
            static_cast<std::uint8_t>(1 << pick(random, 0, 7));
        decodes(wrong);
    }
}

// What is written can be read again, but for the rounding, with the words in any order of axes that leaves no gaps.
void test_words(Random& random) {
    const std::size_t layers = 2, pages = 2, page_tokens = static_cast<std::size_t>(pick(random, 1, 20)), heads = 3;
    const auto dim = static_cast<std::size_t>(pick(random, 1, 40)), tokens = pages * page_tokens;
    const auto in = [](std::size_t n) { return static_cast<std::int64_t>(n); };
    const std::int64_t layer = in(pages * page_tokens * heads * dim);
    for (const bool inner : {true, false}) {
        const KltPlaces places{layers,
                               pages,
                               page_tokens,
                               heads,
                               dim,
                               0,
                               layer,
                               in(page_tokens * heads * dim),
                               inner ? in(heads * dim) : in(1),
                               inner ? in(dim) : in(dim * page_tokens),
                               inner ? in(1) : in(page_tokens)};
        const std::size_t pairs = dim / 2;
        const std::vector<float> cos(tokens * pairs + 1, 0.6f), sin(tokens * pairs + 1, 0.8f);
        std::vector<float> x(layers * heads * dim * tokens), back(x.size());
        for (auto& each : x) each = static_cast<float>(pick(random, -100, 100));
        std::vector<std::uint16_t> words(x.size());
        const KltRope rope{cos.data(), sin.data(), pairs, inner};
        klt_write_bf16(x.data(), heads * dim * tokens, rope, places, words.data());
        CHECK(klt_read_bf16(words.data(), rope, places, back.data(), heads * dim * tokens) < 0x7F80);
        bool near = true;
        for (std::size_t i = 0; i < x.size(); ++i) near = near && x[i] - back[i] < 1.0f && back[i] - x[i] < 1.0f;
        CHECK(near);
    }
}

}  // namespace

void test_klt() {
    Random random(6);
    for_each_simd([&] {
        for (int turn = 0; turn < 20; ++turn) {
            test_transform(random);
            test_rows(random);
            test_stream(random);
            test_words(random);
        }
    });
}
