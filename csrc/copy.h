// Gather and scatter: between pages of an engine and the payload of chunk containers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lmkv {

struct Dim {
    std::int64_t n, engine_stride, payload_stride;
};

// One layer (or its K, or its V) of a group. Page p at chunk position j copies, for a < outer.n and
// b < inner.n, `run` bytes between engine_base + p*page_stride and
// slot + payload_offset + j*payload_page_stride, each a and b strides further on.
struct Plane {
    std::int64_t engine_base, payload_offset, page_stride, payload_page_stride, run;
    Dim outer, inner;
};
inline constexpr std::size_t kPlaneFields = 11;
static_assert(sizeof(Plane) == kPlaneFields * sizeof(std::int64_t));

class CopyPlan {
  public:
    // Copies and simplifies the planes. Throws std::invalid_argument naming the plane when a count
    // is not positive, a payload run leaves [0, payload_bytes) or an engine address overflows.
    CopyPlan(const Plane* planes, std::size_t count, std::int64_t payload_bytes);

    struct Chunks {
        const std::int64_t* slots;   // [count] addresses of the payloads' containers
        const std::int64_t* first;   // [count] chunk position of each chunk's first page
        const std::int64_t* starts;  // [count + 1] into page_ids
        std::size_t count;
        const std::int64_t* page_ids;  // [pages]
        std::size_t pages;
    };

    // Checks every index before a byte moves; throws std::invalid_argument.
    void check(const Chunks& chunks) const;

    // Needs check() to have passed. Streams around the caches from stream_bytes moved upwards.
    void run(const Chunks& chunks, bool gather, int threads, std::int64_t stream_bytes) const;

    std::int64_t bytes_per_page() const { return bytes_per_page_; }
    std::size_t planes() const { return planes_.size(); }

  private:
    struct Item;
    void admit(Plane& plane);
    void run_item(const Item& item, const Chunks& chunks, bool gather, bool stream) const;

    std::vector<Plane> planes_;
    std::int64_t payload_bytes_, bytes_per_page_ = 0;
    std::int64_t max_position_ = INT64_MAX;  // every plane's page stays inside the payload up to here
    std::int64_t max_page_ = INT64_MAX;      // and no engine address overflows
};

}  // namespace lmkv
