#include "memory.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace lmkv {
namespace {

constexpr std::size_t kHuge = 2 << 20, kTouchStep = 16 << 20;

// Where the kernel cannot populate (before 5.14): a compare-and-swap of 0 by 0 writes without
// changing, and unlike an atomic `or 0` no compiler may turn it into a load.
void touch_by_hand(char* begin, char* end) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (char* p = begin; p < end; p += page) {
        char zero = 0;
        __atomic_compare_exchange_n(p, &zero, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

}  // namespace

Slab::Slab(std::size_t nbytes, bool huge, int fd) : nbytes_(nbytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (nbytes == 0 || nbytes > SIZE_MAX / 2) throw std::bad_alloc();
    const std::size_t size = (nbytes + page - 1) / page * page, mapped = size + kHuge;
    struct stat file;
    if (fd >= 0 && (fstat(fd, &file) != 0 || file.st_size < 0 || static_cast<std::size_t>(file.st_size) < size))
        throw std::bad_alloc();
    const int access = PROT_READ | PROT_WRITE;
    // A file's mapping goes over addresses that are only reserved here, to be aligned as well.
    void* map = mmap(nullptr, mapped, fd < 0 ? access : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    char* const start = static_cast<char*>(map);
    base_ = start + (-reinterpret_cast<std::uintptr_t>(start) % kHuge);
    if (base_ > start) munmap(start, static_cast<std::size_t>(base_ - start));
    char* const end = base_ + size;
    if (end < start + mapped) munmap(end, static_cast<std::size_t>(start + mapped - end));
    nbytes_ = size;
    if (fd >= 0 && mmap(base_, size, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(base_, size);
        throw std::bad_alloc();
    }
    if (huge) madvise(base_, size, MADV_HUGEPAGE);
}

bool Slab::enter() {
    int users = users_.load();
    while (users > 0)
        if (users_.compare_exchange_weak(users, users + 1)) return true;
    return false;
}

void Slab::leave() {
    if (users_.fetch_sub(1) == 1) munmap(base_, nbytes_);
}

void Slab::close() {
    if (!closed_.exchange(true)) leave();
}

int Slab::touch(std::size_t start, std::size_t stop) {
    if (!enter()) return -EBADF;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    start -= start % page;
    int result = 0;
    for (std::size_t at = start; at < stop && result == 0; at += kTouchStep) {
        const std::size_t end = std::min(at + kTouchStep, stop);
        if (closed_.load()) {
            result = -EBADF;
        } else if (madvise(base_ + at, end - at, MADV_POPULATE_WRITE) != 0) {
            if (errno == EINVAL)
                touch_by_hand(base_ + at, base_ + end);
            else if (errno != EINTR)
                result = -errno;
            else
                at -= kTouchStep;
        }
    }
    leave();
    return result;
}

}  // namespace lmkv
