// Copies that go around the caches with non-temporal stores, for data too large to be read again soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// A page below this is copied as one stream.
inline constexpr std::size_t kSplitBytes = 4096;

// Copies n bytes; any alignment, no overlap. Call stream_fence() before another thread reads dst.
void stream_copy(char* dst, const char* src, std::size_t n);

// `count` rows of `run` bytes, a cache-line multiple, to line-aligned dst with a line-multiple stride.
void stream_rows(char* dst, std::ptrdiff_t dst_stride, const char* src, std::ptrdiff_t src_stride,
                 std::size_t run, std::size_t count);

void stream_fence();

// How many interleaved streams large runs use here, 0 while the first copies are still measuring.
int stream_count();

// Gathers many small runs into whole cache lines of a growing destination.
class LineWriter {
  public:
    LineWriter() = default;
    LineWriter(const LineWriter&) = delete;
    LineWriter& operator=(const LineWriter&) = delete;
    ~LineWriter() { flush(); }

    void put(char* dst, const char* src, std::size_t n);
    void flush();

  private:
    static constexpr std::size_t kCapacity = 4096;
    alignas(64) char buffer_[kCapacity];
    char* dst_ = nullptr;
    std::size_t skew_ = 0;  // dst_ modulo 64: the buffer keeps the destination's alignment
    std::size_t fill_ = 0;
};

}  // namespace lmkv
