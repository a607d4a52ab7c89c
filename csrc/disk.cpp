#include "disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "pool.h"

namespace lmkv {
namespace {

class Fd {
  public:
    explicit Fd(int fd) : fd_(fd) {}
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;
    ~Fd() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }
    // 0 or -errno; on Linux the descriptor is gone either way.
    int close() {
        const int fd = fd_;
        fd_ = -1;
        return ::close(fd) == 0 || errno == EINTR ? 0 : -errno;
    }

  private:
    int fd_;
};

int open_retry(const char* path, int flags, mode_t mode = 0) {
    int fd;
    do fd = ::open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

// Calls move(at, bytes) -> ssize_t over [0, nbytes) in extents, several in flight. 0 or the first
// -errno.
template <typename Move>
int in_extents(std::size_t nbytes, const IoSettings& settings, const Move& move) {
    std::atomic<int> failed{0};
    const std::size_t extents = (nbytes + settings.extent - 1) / settings.extent;
    io_pool().run(extents, settings.threads, [&](std::size_t i) {
        std::size_t at = i * settings.extent;
        const std::size_t end = std::min(at + settings.extent, nbytes);
        while (at < end && failed.load(std::memory_order_relaxed) == 0) {
            const ssize_t moved = move(at, end - at);
            if (moved > 0) {
                at += static_cast<std::size_t>(moved);
            } else if (moved == 0 || errno != EINTR) {
                int none = 0;
                failed.compare_exchange_strong(none, moved == 0 ? -EIO : -errno);
            }
        }
    });
    return failed.load();
}

int sync_folder_of(const char* path) {
    std::string folder(path);
    const std::size_t slash = folder.rfind('/');
    folder = slash == std::string::npos ? "." : folder.substr(0, std::max<std::size_t>(slash, 1));
    Fd fd(open_retry(folder.c_str(), O_RDONLY | O_DIRECTORY));
    if (fd.get() < 0 || ::fsync(fd.get()) != 0) return -errno;
    return 0;
}

}  // namespace

std::int64_t read_file(const char* path, char* into, std::size_t capacity,
                       const IoSettings& settings) {
    const int flags = O_RDONLY | (settings.direct ? O_DIRECT : 0);
    int opened = open_retry(path, flags | O_NOATIME);
    if (opened < 0 && errno == EPERM) opened = open_retry(path, flags);
    if (opened < 0) return -errno;
    const Fd fd(opened);
    struct stat status;
    if (::fstat(fd.get(), &status) != 0) return -errno;
    const auto size = static_cast<std::size_t>(status.st_size);
    if (!S_ISREG(status.st_mode) || size == 0 || size % kDiskAlign) return -EBADMSG;
    if (size > capacity) return -EFBIG;
    const int result = in_extents(size, settings, [&](std::size_t at, std::size_t n) {
        return ::pread(fd.get(), into + at, n, static_cast<off_t>(at));
    });
    return result ? result : static_cast<std::int64_t>(size);
}

int write_file(const char* tmp, const char* path, const char* from, std::size_t nbytes, bool sync,
               const IoSettings& settings) {
    Fd fd(open_retry(tmp, O_WRONLY | O_CREAT | O_EXCL | (settings.direct ? O_DIRECT : 0), 0600));
    if (fd.get() < 0) {
        const int error = errno;
        // A file system that refuses O_DIRECT may do so after it has made the file.
        if (error == EINVAL && settings.direct) ::unlink(tmp);
        return -error;
    }
    int result = in_extents(nbytes, settings, [&](std::size_t at, std::size_t n) {
        return ::pwrite(fd.get(), from + at, n, static_cast<off_t>(at));
    });
    if (result == 0 && sync && ::fdatasync(fd.get()) != 0) result = -errno;
    const int closed = fd.close();
    if (result == 0) result = closed;
    if (result == 0 && ::rename(tmp, path) != 0) result = -errno;
    if (result != 0) {
        ::unlink(tmp);
        return result;
    }
    return sync ? sync_folder_of(path) : 0;
}

int list_dir(const char* path, std::vector<DirEntry>& entries) {
    struct Record {  // struct linux_dirent64 of getdents(2)
        std::uint64_t inode;
        std::int64_t offset;
        std::uint16_t length;
        std::uint8_t type;
        char name[];
    };
    constexpr std::size_t kBuffer = 256 * 1024;
    const Fd fd(open_retry(path, O_RDONLY | O_DIRECTORY));
    if (fd.get() < 0) return -errno;
    const std::unique_ptr<std::uint64_t[]> buffer(new std::uint64_t[kBuffer / 8]);
    char* const bytes = reinterpret_cast<char*>(buffer.get());
    for (;;) {
        const long got = ::syscall(SYS_getdents64, fd.get(), bytes, kBuffer);
        if (got <= 0) return got == 0 ? 0 : -errno;
        for (long at = 0; at < got;) {
            const auto* record = reinterpret_cast<const Record*>(bytes + at);
            at += record->length;
            if (record->type != DT_REG && record->type != DT_UNKNOWN) continue;
            struct statx status;
            if (::statx(fd.get(), record->name, AT_SYMLINK_NOFOLLOW | AT_STATX_DONT_SYNC,
                        STATX_TYPE | STATX_SIZE | STATX_MTIME, &status) != 0) {
                if (errno == ENOENT) continue;  // deleted since it was listed
                return -errno;
            }
            if (!S_ISREG(status.stx_mode)) continue;
            entries.push_back({record->name, static_cast<std::int64_t>(status.stx_size),
                               status.stx_mtime.tv_sec * 1'000'000'000 + status.stx_mtime.tv_nsec});
        }
    }
}

}  // namespace lmkv
