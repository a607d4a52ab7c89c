// Frequency tables and what is derived from them: alias tables, slot tables, reciprocals.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "rans.h"

namespace lmkv {
namespace {

[[noreturn]] void refuse(const char* what) { throw std::invalid_argument(what); }

void set16(std::uint8_t* low, std::uint8_t* high, std::size_t i, std::uint32_t value) {
    low[i] = static_cast<std::uint8_t>(value), high[i] = static_cast<std::uint8_t>(value >> 8);
}

// Vose's construction in a fixed order, which is part of the format: the lowest open bucket that holds less than
// its size is filled up by the lowest one that holds more, and closed.
RansAlias make_alias(const std::uint16_t* freqs, std::size_t alphabet, int bits) {
    RansAlias out{};
    const int size = 1 << (bits - 4);
    std::array<int, 16> left{};
    std::array<bool, 16> closed{};
    for (std::size_t s = 0; s < alphabet; ++s) {
        left[s] = freqs[s];
        set16(out.freq_low, out.freq_high, s, freqs[s]);
    }
    for (;;) {
        std::size_t small = 0, large = 0;
        while (small < 16 && (closed[small] || left[small] >= size)) ++small;
        if (small == 16) break;
        while (closed[large] || left[large] <= size) ++large;
        out.split[small] = static_cast<std::uint8_t>(left[small]);
        out.other[small] = static_cast<std::uint8_t>(large);
        left[large] -= size - left[small];
        set16(out.base_low, out.base_high, small, static_cast<std::uint32_t>(left[large] - left[small]));
        closed[small] = true;
    }
    // A full bucket: its own symbol from slot 0 on.
    for (std::size_t s = 0; s < 16; ++s)
        if (!closed[s]) out.other[s] = static_cast<std::uint8_t>(s);
    return out;
}

}  // namespace

RansModel::RansModel(const std::uint16_t* freqs_in, std::size_t tables_in, std::size_t alphabet_in, int bits_in)
    : bits(bits_in), tables(tables_in), alphabet(alphabet_in) {
    if (bits < kRansMinBits || bits > kRansMaxBits) refuse("bits must be 8 to 12");
    if (alphabet < 1 || alphabet > 256) refuse("an alphabet has 1 to 256 symbols");
    if (tables < 1 || tables > kRansMaxTableSlots >> bits) refuse("there must be a table, and not too many");
    freqs.assign(freqs_in, freqs_in + tables * alphabet);
    for (std::size_t t = 0; t < tables; ++t) {
        std::uint32_t sum = 0;
        for (std::size_t s = 0; s < alphabet; ++s) sum += freqs[t * alphabet + s];
        if (sum != 1u << bits) refuse("the frequencies of a table must sum to 1 << bits");
    }
    if (small()) {
        alias.resize(tables);
        for (std::size_t t = 0; t < tables; ++t) alias[t] = make_alias(&freqs[t * alphabet], alphabet, bits);
        return;
    }
    slots.reserve(tables << bits);
    for (std::size_t i = 0; i < tables * alphabet; ++i)
        for (std::uint32_t offset = 0; offset < freqs[i]; ++offset)
            slots.push_back(static_cast<std::uint32_t>(i % alphabet) | (freqs[i] - 1u) << 8 | offset << 20);
}

bool RansModel::is(const std::uint16_t* other, std::size_t t, std::size_t a, int b) const {
    return b == bits && t == tables && a == alphabet && std::equal(freqs.begin(), freqs.end(), other);
}

std::shared_ptr<const RansModel> RansModel::cached(const std::uint16_t* freqs, std::size_t tables, std::size_t alphabet,
                                                   int bits) {
    constexpr std::size_t kModels = 8, kLargest = std::size_t{1} << 18;  // slots
    static std::mutex lock;
    static std::array<std::shared_ptr<const RansModel>, kModels> models;  // the latest used first
    if (bits < kRansMinBits || bits > kRansMaxBits || tables > kLargest >> bits)
        return std::make_shared<const RansModel>(freqs, tables, alphabet, bits);
    const auto find = [&] {
        return std::find_if(models.begin(), models.end(),
                            [&](const auto& each) { return each && each->is(freqs, tables, alphabet, bits); });
    };
    {
        const std::lock_guard guard(lock);
        if (const auto found = find(); found != models.end()) {
            std::rotate(models.begin(), found, found + 1);
            return models.front();
        }
    }
    auto made = std::make_shared<const RansModel>(freqs, tables, alphabet, bits);
    const std::lock_guard guard(lock);
    std::rotate(models.begin(), models.end() - 1, models.end());
    return models.front() = made;
}

const RansModel::Encoder& RansModel::encoder() const {
    std::call_once(built_, [this] {
        Encoder e;
        const std::size_t n = tables * alphabet, slot_count = std::size_t{1} << bits;
        e.reciprocal.resize(n), e.start.resize(n);
        for (std::size_t i = 0; i < n; ++i) {
            e.reciprocal[i] = freqs[i] > 1 ? static_cast<std::uint32_t>((std::uint64_t{1} << 32) / freqs[i]) : ~0u;
            e.start[i] = i % alphabet ? static_cast<std::uint16_t>(e.start[i - 1] + freqs[i - 1]) : 0;
        }
        if (small()) {
            e.slot_of.resize(tables * slot_count + 1);  // one more: the vector encoder reads 32 bits at a time
            e.planes.resize(tables);
            const std::size_t size = slot_count / 16;
            for (std::size_t t = 0; t < tables; ++t) {
                const RansAlias& a = alias[t];
                for (std::size_t slot = 0; slot < slot_count; ++slot) {
                    const std::size_t bucket = slot / size, within = slot % size;
                    const bool own = within < a.split[bucket];
                    const std::size_t symbol = own ? bucket : a.other[bucket];
                    const std::size_t base = own ? 0 : a.base_low[bucket] | a.base_high[bucket] << 8;
                    e.slot_of[t * slot_count + e.start[t * alphabet + symbol] + ((within + base) & 0xFFFF)] =
                        static_cast<std::uint16_t>(slot);
                }
                RansPlanes& p = e.planes[t];
                p = {};
                for (std::size_t s = 0; s < alphabet; ++s) {
                    const std::size_t i = t * alphabet + s;
                    set16(p.freq_low, p.freq_high, s, freqs[i]);
                    set16(p.start_low, p.start_high, s, e.start[i]);
                    for (int byte = 0; byte < 4; ++byte)
                        p.reciprocal[byte][s] = static_cast<std::uint8_t>(e.reciprocal[i] >> 8 * byte);
                }
            }
        }
        encoder_ = std::move(e);
    });
    return encoder_;
}

}  // namespace lmkv
