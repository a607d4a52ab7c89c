// Copies that go around the caches with non-temporal stores, for data too large to be read again soon.
#pragma once

#include <cstddef>

namespace lmkv {

inline constexpr std::size_t kLineBytes = 64;
// From here on a copy runs as several interleaved streams.
inline constexpr std::size_t kSplitBytes = 8192;
// How much of a run to come is fetched early, in the second half of this one: enough for the hardware to see
// a stream, and too little to crowd out its own prefetches (fetching all of it measured slower).
inline constexpr std::size_t kAheadBytes = 1024;

// Copies n bytes; any alignment, no overlap. Call stream_fence() before another thread may read dst.
// `ahead`, when not null, is where a later call will read: fetching its start early hides a jump of the source.
void stream_copy(char* dst, const char* src, std::size_t n, const char* ahead = nullptr);

// `count` rows of `run` bytes, dst_stride and src_stride apart; dst, its stride and run are multiples of
// kLineBytes; `ahead` as above, for the last row: each other long row that ends in a jump fetches the next one's start.
void stream_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride, std::size_t run,
                 std::size_t count, const char* ahead);

void stream_fence();

}  // namespace lmkv
