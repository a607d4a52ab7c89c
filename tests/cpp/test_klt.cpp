// The inverse transform and the rows of coefficients against plain loops, in buffers of the exact size, so that the
// sanitizers see every read and write beside them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "klt.h"

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
            test_words(random);
        }
    });
}
