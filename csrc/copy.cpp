#include "copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool.h"
#include "stream.h"

namespace lmkv {
namespace {

[[noreturn]] void refuse(const std::string& what, std::size_t index, const char* why) {
    throw std::invalid_argument(what + " " + std::to_string(index) + ": " + why);
}

std::int64_t add(std::int64_t a, std::int64_t b) {
    std::int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) throw std::overflow_error("");
    return sum;
}

std::int64_t times(std::int64_t a, std::int64_t b) {
    std::int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) throw std::overflow_error("");
    return product;
}

// Whether the outer stride goes on where n inner strides end (a wrapped product matches no valid
// stride).
bool continues(std::int64_t outer, std::int64_t n, std::int64_t inner) {
    return static_cast<std::uint64_t>(outer) ==
           static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(inner);
}

// Drops dimensions of one and joins those that continue each other, so that fewer, longer runs are
// left.
void simplify(Plane& p) {
    for (;;) {
        if (p.n1 == 1 && p.n0 > 1) {
            std::swap(p.n0, p.n1);
            std::swap(p.engine_stride0, p.engine_stride1);
            std::swap(p.payload_stride0, p.payload_stride1);
        }
        if (p.n0 == 1) p.engine_stride0 = p.payload_stride0 = 0;
        if (p.n1 == 1) p.engine_stride1 = p.payload_stride1 = 0;
        if (p.n1 > 1 && p.engine_stride1 == p.run && p.payload_stride1 == p.run) {
            p.run *= p.n1;
            p.n1 = 1;
        } else if (p.n0 > 1 && p.engine_stride0 == p.run && p.payload_stride0 == p.run) {
            p.run *= p.n0;
            p.n0 = 1;
        } else if (p.n0 > 1 && continues(p.engine_stride0, p.n1, p.engine_stride1) &&
                   continues(p.payload_stride0, p.n1, p.payload_stride1)) {
            p.n1 *= p.n0;
            p.n0 = 1;
        } else if (p.n0 > 1 && continues(p.engine_stride1, p.n0, p.engine_stride0) &&
                   continues(p.payload_stride1, p.n0, p.payload_stride0)) {
            p.n1 *= p.n0;
            p.engine_stride1 = p.engine_stride0;
            p.payload_stride1 = p.payload_stride0;
            p.n0 = 1;
        } else {
            return;
        }
    }
}

// The same copy seen from one direction, the outer dimension first.
struct Move {
    std::ptrdiff_t dst_page, src_page, run;
    std::ptrdiff_t n0, dst0, src0, n1, dst1, src1;
    bool lines;  // every run is whole cache lines of the destination when the page is

    Move(const Plane& p, bool gather) : run(p.run), n0(p.n0), n1(p.n1) {
        dst_page = gather ? p.payload_page_stride : p.page_stride;
        src_page = gather ? p.page_stride : p.payload_page_stride;
        dst0 = gather ? p.payload_stride0 : p.engine_stride0;
        src0 = gather ? p.engine_stride0 : p.payload_stride0;
        dst1 = gather ? p.payload_stride1 : p.engine_stride1;
        src1 = gather ? p.engine_stride1 : p.payload_stride1;
        constexpr auto line = static_cast<std::ptrdiff_t>(kLineBytes);
        lines = run % line == 0 && dst0 % line == 0 && dst1 % line == 0;
        // Whole lines go around the cache in any order, so read in order; else fill the written
        // lines.
        if (n0 > 1 && (lines ? std::abs(src0) < std::abs(src1) : std::abs(dst0) < std::abs(dst1))) {
            std::swap(n0, n1);
            std::swap(dst0, dst1);
            std::swap(src0, src1);
        }
    }

    bool single() const { return n0 == 1 && n1 == 1; }

    void page(char* dst, const char* src, const char* ahead, bool stream) const {
        const auto n = static_cast<std::size_t>(run), rows = static_cast<std::size_t>(n1);
        const bool aligned = lines && reinterpret_cast<std::uintptr_t>(dst) % kLineBytes == 0;
        for (std::ptrdiff_t a = 0; a < n0; ++a, dst += dst0, src += src0) {
            if (stream && aligned && n < kSplitBytes) {
                stream_rows(dst, dst1, src, src1, n, rows, ahead);
                continue;
            }
            for (std::ptrdiff_t b = 0; b < n1; ++b) {
                if (stream && n >= kSplitBytes)
                    stream_copy(dst + b * dst1, src + b * src1, n);
                else
                    std::memcpy(dst + b * dst1, src + b * src1, n);
            }
        }
    }
};

constexpr std::int64_t kItemBytes = 1 << 20, kPagesAhead = 2;

}  // namespace

struct CopyPlan::Item {
    std::size_t chunk;
    std::size_t plane;
    std::int64_t begin, end;  // into page_ids
};

CopyPlan::CopyPlan(const Plane* planes, std::size_t count, std::int64_t payload_bytes)
    : planes_(planes, planes + count) {
    if (count == 0) throw std::invalid_argument("a copy plan needs at least one plane");
    if (payload_bytes <= 0) throw std::invalid_argument("payload_bytes must be positive");
    for (std::size_t i = 0; i < count; ++i) {
        Plane& p = planes_[i];
        if (p.run <= 0 || p.n0 <= 0 || p.n1 <= 0)
            refuse("plane", i, "run_bytes, n0 and n1 must be positive");
        if (p.payload_offset < 0 || p.payload_page_stride < 0 || p.payload_stride0 < 0 ||
            p.payload_stride1 < 0)
            refuse("plane", i, "payload offset and strides must not be negative");
        if (p.engine_base <= 0) refuse("plane", i, "engine_base is not an address");
        try {
            const std::int64_t e0 = times(p.n0 - 1, p.engine_stride0);
            const std::int64_t e1 = times(p.n1 - 1, p.engine_stride1);
            const std::int64_t low =
                add(std::min<std::int64_t>(e0, 0), std::min<std::int64_t>(e1, 0));
            const std::int64_t high =
                add(std::max<std::int64_t>(e0, 0), std::max<std::int64_t>(e1, 0));
            if (add(p.engine_base, low) <= 0) refuse("plane", i, "an engine address is negative");
            const std::int64_t room = INT64_MAX - add(add(p.engine_base, high), p.run);
            if (p.page_stride != 0) {
                const std::int64_t most = p.page_stride > 0 ? room : p.engine_base + low - 1;
                max_page_ =
                    std::min(max_page_,
                             most / (p.page_stride > 0 ? p.page_stride : times(p.page_stride, -1)));
            }
            const std::int64_t end = add(
                add(p.payload_offset,
                    add(times(p.n0 - 1, p.payload_stride0), times(p.n1 - 1, p.payload_stride1))),
                p.run);
            if (end > payload_bytes) refuse("plane", i, "a page does not fit into payload_bytes");
            const std::int64_t most =
                p.payload_page_stride ? (payload_bytes - end) / p.payload_page_stride : 0;
            max_position_ = std::min(max_position_, most);
            bytes_per_page_ = add(bytes_per_page_, times(p.run, times(p.n0, p.n1)));
        } catch (const std::overflow_error&) {
            refuse("plane", i, "sizes overflow 63 bits");
        }
        simplify(p);
    }
}

void CopyPlan::check(const Chunks& c) const {
    const auto pages = static_cast<std::int64_t>(c.pages);
    if (c.starts[0] < 0) throw std::invalid_argument("starts must not be negative");
    for (std::size_t i = 0; i < c.count; ++i) {
        const std::int64_t begin = c.starts[i], end = c.starts[i + 1], first = c.first[i];
        if (begin > end || end > pages)
            refuse("chunk", i, "starts must rise and stay inside page_ids");
        if (first < 0 || (end > begin && first > max_position_ - (end - begin - 1)))
            refuse("chunk", i, "a page position lies outside the payload");
        if (c.slots[i] <= 0) refuse("chunk", i, "the slot is not an address");
        for (std::int64_t k = begin; k < end; ++k)
            if (c.page_ids[k] < 0 || c.page_ids[k] > max_page_)
                refuse("page_ids", static_cast<std::size_t>(k), "not a page of this plan");
    }
}

void CopyPlan::run(const Chunks& c, bool gather, int threads, std::int64_t stream_bytes) const {
    std::vector<Item> items;
    std::int64_t total = 0;
    for (std::size_t chunk = 0; chunk < c.count; ++chunk) {
        for (std::size_t plane = 0; plane < planes_.size(); ++plane) {
            const Plane& p = planes_[plane];
            const std::int64_t bytes = p.run * p.n0 * p.n1,
                               step = std::max<std::int64_t>(1, kItemBytes / bytes);
            for (std::int64_t at = c.starts[chunk]; at < c.starts[chunk + 1]; at += step)
                items.push_back({chunk, plane, at, std::min(at + step, c.starts[chunk + 1])});
        }
        total += (c.starts[chunk + 1] - c.starts[chunk]) * bytes_per_page_;
    }
    const bool stream = total >= stream_bytes;
    copy_pool().run(items.size(), threads,
                    [&](std::size_t i) { run_item(items[i], c, gather, stream); });
}

void CopyPlan::run_item(const Item& item, const Chunks& c, bool gather, bool stream) const {
    const Plane& plane = planes_[item.plane];
    const Move move(plane, gather);
    char* const payload = reinterpret_cast<char*>(c.slots[item.chunk]) + plane.payload_offset;
    char* const engine = reinterpret_cast<char*>(plane.engine_base);
    const std::int64_t shift = c.first[item.chunk] - c.starts[item.chunk];
    // Pages that follow each other on both sides are one run.
    const bool joins = move.single() && move.dst_page == move.run && move.src_page == move.run;
    for (std::int64_t k = item.begin, next; k < item.end; k = next) {
        next = k + 1;
        while (joins && next < item.end && c.page_ids[next] == c.page_ids[next - 1] + 1) ++next;
        char* const page = engine + c.page_ids[k] * plane.page_stride;
        char* const place = payload + (k + shift) * plane.payload_page_stride;
        char* const dst = gather ? place : page;
        const char* const src = gather ? page : place;
        if (next > k + 1) {
            const auto n = static_cast<std::size_t>(move.run * (next - k));
            stream ? stream_copy(dst, src, n) : static_cast<void>(std::memcpy(dst, src, n));
            continue;
        }
        const bool jumps = gather && move.single() && k + kPagesAhead < item.end;
        move.page(dst, src,
                  jumps ? engine + c.page_ids[k + kPagesAhead] * plane.page_stride : nullptr,
                  stream);
    }
    if (stream) stream_fence();
}

}  // namespace lmkv
