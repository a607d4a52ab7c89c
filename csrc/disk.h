// Whole files to and from aligned memory, and fast directory listings. Errors come back as -errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lmkv {

inline constexpr std::size_t kDiskAlign = 4096;

struct IoSettings {
    bool direct;         // O_DIRECT: memory must be aligned to kDiskAlign
    std::size_t extent;  // bytes of one read or write call, a multiple of kDiskAlign
    int threads;         // extents in flight
};

// Reads the whole file at path. Returns its size; -EFBIG when larger than capacity, -EBADMSG when
// its size is 0 or no multiple of kDiskAlign (or it is no regular file), -EIO when it ends early.
std::int64_t read_file(const char* path, char* into, std::size_t capacity, const IoSettings& settings);

// Creates tmp (which must not exist), writes nbytes, renames it to path. With sync the data is on
// stable storage before the rename and the rename after it. Returns 0; on failure tmp is gone and
// path unchanged, except that a failed sync of the folder leaves path in place.
int write_file(const char* tmp, const char* path, const char* from, std::size_t nbytes, bool sync,
               const IoSettings& settings);

struct DirEntry {
    std::string name;
    std::int64_t size;
    std::int64_t mtime_ns;
};

// The regular files of a folder, in no order. Returns 0 or -errno.
int list_dir(const char* path, std::vector<DirEntry>& entries);

}  // namespace lmkv
