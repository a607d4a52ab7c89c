#include "disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "pool.h"

namespace lmkv {
namespace {

class Fd {
  public:
    Fd(const char* path, int flags, mode_t mode = 0) {
        while ((fd_ = ::open(path, flags | O_CLOEXEC, mode)) < 0) {
            if (errno == EPERM && flags & O_NOATIME)
                flags &= ~O_NOATIME;  // not the file's owner
            else if (errno != EINTR)
                return;
        }
    }
    ~Fd() { close(); }
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;

    bool ok() const { return fd_ >= 0; }
    int get() const { return fd_; }
    // 0 or -errno; Linux frees the descriptor either way.
    int close() {
        const int fd = std::exchange(fd_, -1);
        return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : -errno;
    }

  private:
    int fd_;
};

// Calls move(at, bytes) -> ssize_t over [0, nbytes) in extents, several in flight. 0 or the first -errno.
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
    const Fd fd(folder.c_str(), O_RDONLY | O_DIRECTORY);
    return fd.ok() && ::fsync(fd.get()) == 0 ? 0 : -errno;
}

}  // namespace

std::int64_t read_file(const char* path, char* into, std::size_t capacity, const IoSettings& settings) {
    const Fd fd(path, O_RDONLY | O_NOATIME | (settings.direct ? O_DIRECT : 0));
    if (!fd.ok()) return -errno;
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
    Fd fd(tmp, O_WRONLY | O_CREAT | O_EXCL | (settings.direct ? O_DIRECT : 0), 0600);
    if (!fd.ok()) {
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
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path), ::closedir);
    if (!folder) return -errno;
    for (;;) {
        errno = 0;
        const dirent* const entry = ::readdir(folder.get());
        if (!entry) return -errno;
        if (entry->d_type != DT_REG && entry->d_type != DT_UNKNOWN) continue;
        struct statx status;
        if (::statx(::dirfd(folder.get()), entry->d_name, AT_SYMLINK_NOFOLLOW | AT_STATX_DONT_SYNC,
                    STATX_TYPE | STATX_SIZE | STATX_MTIME, &status) != 0) {
            if (errno == ENOENT) continue;  // deleted since it was listed
            return -errno;
        }
        if (!S_ISREG(status.stx_mode)) continue;
        entries.push_back({entry->d_name, static_cast<std::int64_t>(status.stx_size),
                           status.stx_mtime.tv_sec * 1'000'000'000 + status.stx_mtime.tv_nsec});
    }
}

}  // namespace lmkv
