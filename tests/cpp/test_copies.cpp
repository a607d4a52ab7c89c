// Copy plans against a copy byte by byte, and their validation against 128-bit arithmetic.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "copy.h"
#include "stream.h"

namespace {

using lmkv::CopyPlan;
using lmkv::Plane;
using std::int64_t;

struct alignas(64) Line {
    char bytes[64];
    bool operator==(const Line&) const = default;
};
using Memory = std::vector<Line>;  // starts at a line, so that aligned plans exist

Memory memory(int64_t nbytes, Random& random) {
    Memory lines(static_cast<std::size_t>(nbytes) / sizeof(Line) + 1);
    for (Line& line : lines)
        for (char& c : line.bytes) c = static_cast<char>(random());
    return lines;
}

// Addresses are offsets into engine and payload until place() has run.
struct World {
    Memory engine, payload;
    std::vector<Plane> planes;
    std::vector<int64_t> slots, first, starts, ids;
    int64_t payload_bytes = 0;

    CopyPlan::Chunks chunks() const {
        return {slots.data(), first.data(), starts.data(), slots.size(), ids.data(), ids.size()};
    }
};

// One to three planes of random boxes, dense or with gaps, in either dimension order on each side.
World random_world(Random& random) {
    World w;
    const int64_t planes = pick(random, 1, 3), pages = pick(random, 1, 9), positions = pick(random, 1, 6);
    const int64_t unit = int64_t{1} << pick(random, 0, 6);  // 1: any alignment, 64: whole lines
    int64_t engine_at = unit == 64 ? 0 : pick(random, 0, 70), payload_at = 0;
    for (int64_t i = 0; i < planes; ++i) {
        Plane p{};
        p.run = unit * pick(random, 1, pick(random, 0, 4) ? 20 : 20000 / unit);
        p.outer.n = pick(random, 0, 2) ? pick(random, 1, 5) : 1;
        p.inner.n = pick(random, 0, 2) ? pick(random, 1, 5) : 1;
        const auto lay = [&](int64_t lmkv::Dim::* side) {
            const bool reversed = pick(random, 0, 1);
            lmkv::Dim &fast = reversed ? p.outer : p.inner, &slow = reversed ? p.inner : p.outer;
            fast.*side = p.run + unit * pick(random, 0, 1);
            slow.*side = fast.*side * fast.n + unit * pick(random, 0, 1);
            return slow.*side * slow.n + unit * pick(random, 0, 1);
        };
        p.page_stride = lay(&lmkv::Dim::engine_stride);
        p.payload_page_stride = lay(&lmkv::Dim::payload_stride);
        p.engine_base = engine_at;
        p.payload_offset = payload_at;
        engine_at += p.page_stride * pages;
        payload_at += p.payload_page_stride * positions;
        w.planes.push_back(p);
    }
    w.payload_bytes = payload_at;
    const int64_t chunks = pick(random, 1, 3);
    w.engine = memory(engine_at, random);
    w.payload = memory((payload_at + 64) * chunks, random);
    w.starts.push_back(0);
    std::vector<int64_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    if (pick(random, 0, 1)) std::shuffle(order.begin(), order.end(), random);
    for (int64_t c = 0; c < chunks; ++c) {
        w.slots.push_back(c * (payload_at + (unit == 64 ? 0 : pick(random, 0, 64))));
        w.first.push_back(pick(random, 0, positions));
        const auto left = static_cast<int64_t>(order.size()) - w.starts.back();
        const int64_t count = std::min(left, pick(random, 0, positions - w.first.back()));
        w.starts.push_back(w.starts.back() + count);
    }
    w.ids.assign(order.begin(), order.begin() + w.starts.back());
    return w;
}

// What the plan means, said as simply as possible.
void naive_copy(const World& w, bool gather) {
    for (std::size_t c = 0; c < w.slots.size(); ++c)
        for (int64_t k = w.starts[c]; k < w.starts[c + 1]; ++k)
            for (const Plane& p : w.planes)
                for (int64_t a = 0; a < p.outer.n; ++a)
                    for (int64_t b = 0; b < p.inner.n; ++b) {
                        char* e = reinterpret_cast<char*>(p.engine_base + w.ids[k] * p.page_stride +
                                                          a * p.outer.engine_stride + b * p.inner.engine_stride);
                        char* s = reinterpret_cast<char*>(w.slots[c] + p.payload_offset +
                                                          (w.first[c] + k - w.starts[c]) * p.payload_page_stride +
                                                          a * p.outer.payload_stride + b * p.inner.payload_stride);
                        for (int64_t i = 0; i < p.run; ++i) gather ? s[i] = e[i] : e[i] = s[i];
                    }
}

World place(World w) {
    for (Plane& p : w.planes) p.engine_base += reinterpret_cast<int64_t>(w.engine.data());
    for (int64_t& slot : w.slots) slot += reinterpret_cast<int64_t>(w.payload.data());
    return w;
}

void test_random_plans(Random& random, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const World world = random_world(random);
        const World real = place(world), naive = place(world);
        const CopyPlan plan(real.planes.data(), real.planes.size(), real.payload_bytes);
        plan.check(real.chunks());
        const bool gather = pick(random, 0, 1);
        plan.run(real.chunks(), gather, static_cast<int>(pick(random, 1, 3)), pick(random, 0, 1) ? 0 : INT64_MAX);
        naive_copy(naive, gather);
        CHECK(real.engine == naive.engine);
        CHECK(real.payload == naive.payload);
    }
}

void test_stream_copy(Random& random) {
    constexpr std::size_t kBytes = 80000;
    const Memory from = memory(kBytes, random);
    for (int round = 0; round < 300; ++round) {
        Memory to = memory(kBytes, random), expected = to;
        const auto n = static_cast<std::size_t>(pick(random, 0, round % 3 ? 70000 : 300));
        const int64_t src = pick(random, 0, 200), dst = pick(random, 0, 200);
        std::memcpy(reinterpret_cast<char*>(expected.data()) + dst, reinterpret_cast<const char*>(from.data()) + src,
                    n);
        lmkv::stream_copy(reinterpret_cast<char*>(to.data()) + dst, reinterpret_cast<const char*>(from.data()) + src,
                          n);
        lmkv::stream_fence();
        CHECK(to == expected);
    }
}

template <typename Call>
bool refused(const Call& call) {
    try {
        call();
        return false;
    } catch (const std::invalid_argument&) {
        return true;
    }
}

int64_t wild(Random& random) {
    switch (pick(random, 0, 5)) {
        case 0: return static_cast<int64_t>(random());
        case 1: return INT64_MAX - pick(random, 0, 2);
        case 2: return INT64_MIN + pick(random, 0, 2);
        case 3: return int64_t{1} << pick(random, 0, 62);
        default: return pick(random, -3, 4096);
    }
}

// Numbers that are mostly sensible, with some made wild.
Plane wild_plane(Random& random) {
    Plane p{1 << 20, 0, 4096, 4096, 64, {4, 1024, 256}, {4, 64, 64}};
    auto* const fields = reinterpret_cast<int64_t*>(&p);
    for (int64_t i = pick(random, 0, 4); i > 0; --i) fields[pick(random, 0, lmkv::kPlaneFields - 1)] = wild(random);
    return p;
}

// What an accepted plan promises for page `id` at position `j`, in arithmetic that cannot overflow.
bool inside(const Plane& p, __int128 id, __int128 j, __int128 payload_bytes) {
    for (const int64_t a : {int64_t{0}, p.outer.n - 1})
        for (const int64_t b : {int64_t{0}, p.inner.n - 1}) {
            const __int128 e = p.engine_base + id * p.page_stride + static_cast<__int128>(a) * p.outer.engine_stride +
                               static_cast<__int128>(b) * p.inner.engine_stride;
            const __int128 s = p.payload_offset + j * p.payload_page_stride +
                               static_cast<__int128>(a) * p.outer.payload_stride +
                               static_cast<__int128>(b) * p.inner.payload_stride;
            if (e <= 0 || e + p.run > INT64_MAX || s < 0 || s + p.run > payload_bytes) return false;
        }
    return true;
}

void test_wild_plans(Random& random, int rounds) {
    int accepted = 0, copied = 0;
    for (int round = 0; round < rounds; ++round) {
        const Plane plane = wild_plane(random);
        const int64_t payload_bytes = pick(random, 0, 3) ? 1 << 16 : wild(random);
        std::vector<CopyPlan> plan;
        if (refused([&] { plan.emplace_back(&plane, 1, payload_bytes); })) continue;
        ++accepted;
        CHECK(plane.run > 0 && plane.outer.n > 0 && plane.inner.n > 0);
        CHECK(inside(plane, 0, 0, payload_bytes));
        const int64_t id = pick(random, 0, 2) ? pick(random, 0, 40) : wild(random);
        const int64_t ids[] = {id, 1}, slots[] = {pick(random, 0, 3) ? 1 << 21 : wild(random)};
        const int64_t first[] = {pick(random, 0, 2) ? pick(random, 0, 20) : wild(random)};
        const int64_t starts[] = {pick(random, 0, 5) ? 0 : wild(random), pick(random, 0, 5) ? 1 : wild(random)};
        const CopyPlan::Chunks chunks{slots, first, starts, 1, ids, 2};
        if (refused([&] { plan[0].check(chunks); })) continue;
        ++copied;
        CHECK(slots[0] > 0 && static_cast<__int128>(slots[0]) + payload_bytes <= INT64_MAX);
        CHECK(0 <= starts[0] && starts[0] <= starts[1] && starts[1] <= 2);
        for (int64_t k = starts[0]; k < starts[1]; ++k)
            CHECK(inside(plane, ids[k], static_cast<__int128>(first[0]) + k - starts[0], payload_bytes));
    }
    CHECK(accepted > rounds / 20 && copied > rounds / 50);
}

}  // namespace

void test_copies() {
    for_each_simd([] {
        Random random(20);
        test_random_plans(random, 400);
        test_stream_copy(random);
    });
}

void test_plan_validation() {
    Random random(7);
    test_wild_plans(random, 20000);
    CHECK(refused([] { CopyPlan(nullptr, 0, 4096); }));
    const Plane page{4096, 0, 64, 64, 64, {1, 0, 0}, {1, 0, 0}};
    const CopyPlan plan(&page, 1, 256);
    CHECK(plan.planes() == 1 && plan.bytes_per_page() == 64);
    const int64_t slots[] = {4096}, ids[] = {0, 1, 2, 3, 4}, zero[] = {0}, one[] = {1}, all[] = {0, 4}, more[] = {0, 5};
    CHECK(!refused([&] { plan.check({slots, zero, all, 1, ids, 5}); }));
    CHECK(refused([&] { plan.check({slots, one, all, 1, ids, 5}); }));
    CHECK(refused([&] { plan.check({slots, zero, more, 1, ids, 5}); }));
    CHECK(refused([&] { plan.check({slots, zero, all, 1, ids, 3}); }));
}
