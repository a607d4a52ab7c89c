// Host memory for chunk containers: mappings aligned to huge pages, private or of a file shared between processes.
#pragma once

#include <atomic>
#include <cstddef>

namespace lmkv {

class Slab {
  public:
    // Maps nbytes of zeros, or the start of the file fd (which stays the caller's), backed by huge pages when asked
    // and possible. Throws std::bad_alloc, also for a file that is shorter.
    Slab(std::size_t nbytes, bool huge, int fd = -1);
    ~Slab() { close(); }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    char* base() const { return base_; }
    std::size_t nbytes() const { return nbytes_; }

    // Faults in the pages of [start, stop) without changing a byte, even while others write there.
    // Returns 0 or -errno; -EBADF once closed. Throws nothing.
    int touch(std::size_t start, std::size_t stop);

    // Unmaps, at once or when the last touch() in progress has noticed. May be called twice.
    void close();
    bool closed() const { return closed_.load(); }

  private:
    bool enter();
    void leave();

    char* base_ = nullptr;
    std::size_t nbytes_;
    std::atomic<bool> closed_{false};
    std::atomic<int> users_{1};  // the owner until close(), and every touch() in progress
};

}  // namespace lmkv
