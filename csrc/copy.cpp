#include "copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "pool.h"
#include "stream.h"

namespace lmkv {
namespace {

using std::int64_t;

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

int64_t add(int64_t a, int64_t b) {
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) refuse("sizes overflow 63 bits");
    return sum;
}

int64_t times(int64_t a, int64_t b) {
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) refuse("sizes overflow 63 bits");
    return product;
}

// Whether `outer` goes on where n steps of `inner` end; a wrapped product equals no stride that fits.
bool continues(int64_t outer, int64_t n, int64_t inner) {
    return static_cast<std::uint64_t>(outer) == static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(inner);
}

// Joins dimensions that continue each other, so that fewer, longer runs are left.
void simplify(Plane& p) {
    constexpr Dim one{1, 0, 0};
    if (p.outer.n == 1) p.outer = one;
    if (p.inner.n == 1) p.inner = one;
    const bool inside_out = p.outer.payload_stride < p.inner.payload_stride;
    if (p.inner.n == 1 || (p.outer.n > 1 && inside_out)) std::swap(p.outer, p.inner);
    while (p.inner.n > 1 && p.inner.engine_stride == p.run && p.inner.payload_stride == p.run) {
        p.run *= p.inner.n;
        p.inner = std::exchange(p.outer, one);
    }
    if (p.outer.n > 1 && continues(p.outer.engine_stride, p.inner.n, p.inner.engine_stride) &&
        continues(p.outer.payload_stride, p.inner.n, p.inner.payload_stride))
        p.inner.n *= std::exchange(p.outer, one).n;
}

// From here on a run that is not line-aligned streams too: libc's copy to a misaligned place takes three times as
// long on some CPUs.
constexpr std::size_t kMisalignedBytes = 1024;

// The same copy seen from one direction.
struct Move {
    struct Step {
        std::ptrdiff_t n, dst, src;
    };
    std::size_t run;
    std::ptrdiff_t dst_page, src_page;
    Step outer, inner;
    bool lines;  // if a page of the destination starts at a cache line, so does every run

    static Step step(const Dim& d, bool gather) {
        return gather ? Step{d.n, d.payload_stride, d.engine_stride} : Step{d.n, d.engine_stride, d.payload_stride};
    }

    Move(const Plane& p, bool gather)
        : run(static_cast<std::size_t>(p.run)),
          dst_page(gather ? p.payload_page_stride : p.page_stride),
          src_page(gather ? p.page_stride : p.payload_page_stride),
          outer(step(p.outer, gather)),
          inner(step(p.inner, gather)) {
        constexpr auto line = static_cast<std::ptrdiff_t>(kLineBytes);
        lines = run % kLineBytes == 0 && outer.dst % line == 0 && inner.dst % line == 0;
        // Whole lines go around the cache in any order, so read in order; else fill the written lines.
        const bool swapped =
            lines ? std::abs(outer.src) < std::abs(inner.src) : std::abs(outer.dst) < std::abs(inner.dst);
        if (outer.n > 1 && swapped) std::swap(outer, inner);
    }

    bool single() const { return outer.n == 1 && inner.n == 1; }

    // One page; `ahead` is where the next pages will be read, or null.
    void page(char* dst, const char* src, const char* ahead, bool stream) const {
        const bool rows =
            stream && run < kSplitBytes && lines && reinterpret_cast<std::uintptr_t>(dst) % kLineBytes == 0;
        for (std::ptrdiff_t a = 0; a < outer.n; ++a, dst += outer.dst, src += outer.src) {
            if (rows) {
                stream_rows(dst, inner.dst, src, inner.src, run, inner.n, ahead);
                continue;
            }
            for (std::ptrdiff_t b = 0; b < inner.n; ++b)
                copy(dst + b * inner.dst, src + b * inner.src, run, ahead, stream);
        }
    }

    static void copy(char* dst, const char* src, std::size_t n, const char* ahead, bool stream) {
        if (stream && n >= kMisalignedBytes)
            stream_copy(dst, src, n, ahead);
        else
            std::memcpy(dst, src, n);
    }
};

constexpr int64_t kItemBytes = 1 << 20;

}  // namespace

struct CopyPlan::Item {
    std::size_t chunk, plane;
    int64_t begin, end;  // into page_ids
};

CopyPlan::CopyPlan(const Plane* planes, std::size_t count, int64_t payload_bytes)
    : planes_(planes, planes + count), payload_bytes_(payload_bytes) {
    if (count == 0) refuse("a copy plan needs at least one plane");
    if (payload_bytes <= 0) refuse("payload_bytes must be positive");
    for (std::size_t i = 0; i < count; ++i) {
        try {
            admit(planes_[i]);
        } catch (const std::invalid_argument& error) {
            refuse(("plane " + std::to_string(i) + ": " + error.what()).c_str());
        }
    }
}

void CopyPlan::admit(Plane& p) {
    const Dim &outer = p.outer, &inner = p.inner;
    if (p.run <= 0 || outer.n <= 0 || inner.n <= 0) refuse("run_bytes, n0 and n1 must be positive");
    if (std::min({p.payload_offset, p.payload_page_stride, outer.payload_stride, inner.payload_stride}) < 0)
        refuse("payload offset and strides must not be negative");

    const int64_t reach = add(times(outer.n - 1, outer.payload_stride), times(inner.n - 1, inner.payload_stride));
    const int64_t spare = payload_bytes_ - add(add(p.payload_offset, reach), p.run);
    if (spare < 0) refuse("a page does not fit into payload_bytes");
    max_position_ = std::min(max_position_, p.payload_page_stride ? spare / p.payload_page_stride : 0);

    int64_t low = p.engine_base, high = add(p.engine_base, p.run);
    for (const Dim* d : {&outer, &inner}) {
        const int64_t far = times(d->n - 1, d->engine_stride);
        (far < 0 ? low : high) = add(far < 0 ? low : high, far);
    }
    if (low <= 0) refuse("an engine address is not positive");
    if (p.page_stride > 0) max_page_ = std::min(max_page_, (INT64_MAX - high) / p.page_stride);
    if (p.page_stride < 0) max_page_ = std::min(max_page_, (low - 1) / times(p.page_stride, -1));

    bytes_per_page_ = add(bytes_per_page_, times(p.run, times(outer.n, inner.n)));
    simplify(p);
}

void CopyPlan::check(const Chunks& c) const {
    int64_t at = 0;
    for (std::size_t i = 0; i < c.count; ++i) {
        const int64_t begin = c.starts[i], end = c.starts[i + 1], first = c.first[i];
        if (begin < at || begin > end || end > static_cast<int64_t>(c.pages))
            refuse("starts must not fall and stay inside page_ids");
        if (first < 0 || first > max_position_ + 1 - (end - begin)) refuse("a page position lies outside the payload");
        if (c.slots[i] <= 0 || c.slots[i] > INT64_MAX - payload_bytes_) refuse("a slot is no address");
        for (at = begin; at < end; ++at)
            if (c.page_ids[at] < 0 || c.page_ids[at] > max_page_) refuse("a page id is no page");
    }
}

void CopyPlan::run(const Chunks& c, bool gather, int threads, int64_t stream_bytes) const {
    std::vector<Item> items;
    int64_t total = 0;
    for (std::size_t chunk = 0; chunk < c.count; ++chunk) {
        const int64_t begin = c.starts[chunk], end = c.starts[chunk + 1];
        total += (end - begin) * bytes_per_page_;
        for (std::size_t plane = 0; plane < planes_.size(); ++plane) {
            const Plane& p = planes_[plane];
            const int64_t step = std::max<int64_t>(1, kItemBytes / (p.run * p.outer.n * p.inner.n));
            for (int64_t at = begin; at < end; at += step)
                items.push_back({chunk, plane, at, std::min(at + step, end)});
        }
    }
    const bool stream = total >= stream_bytes;
    copy_pool().run(items.size(), threads, [&](std::size_t i) { run_item(items[i], c, gather, stream); });
}

void CopyPlan::run_item(const Item& item, const Chunks& c, bool gather, bool stream) const {
    const Plane& plane = planes_[item.plane];
    const Move move(plane, gather);
    const auto page = [&](int64_t k) {
        return reinterpret_cast<char*>(plane.engine_base + c.page_ids[k] * plane.page_stride);
    };
    char* const payload = reinterpret_cast<char*>(c.slots[item.chunk] + plane.payload_offset);
    const int64_t shift = c.first[item.chunk] - c.starts[item.chunk];
    // Pages that follow each other on both sides are one run.
    const auto run = static_cast<std::ptrdiff_t>(move.run);
    const bool joins = move.single() && move.dst_page == run && move.src_page == run;
    const auto distance = static_cast<int64_t>(std::max<std::size_t>(1, 2 * kAheadBytes / move.run));
    for (int64_t k = item.begin, next; k < item.end; k = next) {
        next = k + 1;
        while (joins && next < item.end && c.page_ids[next] == c.page_ids[next - 1] + 1) ++next;
        char* const place = payload + (k + shift) * plane.payload_page_stride;
        char* const dst = gather ? place : page(k);
        const char* const src = gather ? page(k) : place;
        if (next > k + 1) {
            Move::copy(dst, src, move.run * static_cast<std::size_t>(next - k), nullptr, stream);
        } else {
            const bool jumps = gather && k + distance < item.end;
            move.page(dst, src, jumps ? page(k + distance) : nullptr, stream);
        }
    }
    if (stream) stream_fence();
}

}  // namespace lmkv
