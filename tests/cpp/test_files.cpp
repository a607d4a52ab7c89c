// Whole files: round trips, every refusal, and file systems that are full or read-only.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "disk.h"
#include "memory.h"

namespace {

namespace fs = std::filesystem;

constexpr lmkv::IoSettings kBuffered{false, 1 << 20, 4};

struct Folder {
    std::string path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "lmkv-XXXXXX").string();
        path = mkdtemp(name.data());
    }
    ~Folder() { fs::remove_all(path); }
    std::string operator/(const char* name) const { return path + "/" + name; }
};

int write(const std::string& tmp, const std::string& path, const char* from, std::size_t n, bool sync = false,
          const lmkv::IoSettings& settings = kBuffered) {
    return lmkv::write_file(tmp.c_str(), path.c_str(), from, n, sync, settings);
}

std::int64_t read(const std::string& path, char* into, std::size_t capacity,
                  const lmkv::IoSettings& settings = kBuffered) {
    return lmkv::read_file(path.c_str(), into, capacity, settings);
}

void fill(lmkv::Slab& slab) {
    Random random(1);
    for (std::size_t i = 0; i < slab.nbytes(); i += 8) {
        const std::uint64_t word = random();
        std::memcpy(slab.base() + i, &word, sizeof word);
    }
}

void test_round_trips(const Folder& folder, lmkv::Slab& from, lmkv::Slab& into) {
    const std::string tmp = folder / "tmp", path = folder / "file";
    for (const bool direct : {false, true})
        for (const std::size_t extent : {4096u, 65536u, 4u << 20})
            for (const std::size_t n : {4096u, 65536u, 65536u + 4096u, (1u << 20) + 12288u})
                for (const int threads : {1, 4}) {
                    const lmkv::IoSettings settings{direct, extent, threads};
                    const int wrote = write(tmp, path, from.base(), n, extent == 65536, settings);
                    if (direct && wrote == -EINVAL) continue;  // a file system without O_DIRECT
                    CHECK(wrote == 0 && !fs::exists(tmp));
                    std::memset(into.base(), 0, n);
                    CHECK(read(path, into.base(), n, settings) == static_cast<std::int64_t>(n));
                    CHECK(std::memcmp(from.base(), into.base(), n) == 0);
                }
}

void test_refused_reads(const Folder& folder, lmkv::Slab& into) {
    CHECK(read(folder / "missing", into.base(), 4096) == -ENOENT);
    CHECK(read(folder / "no/file", into.base(), 4096) == -ENOENT);
    CHECK(read(folder.path, into.base(), 4096) == -EBADMSG);
    for (const std::size_t size : {0u, 1u, 4095u, 4097u}) {
        std::ofstream(folder / "odd") << std::string(size, 'x');
        CHECK(read(folder / "odd", into.base(), 1 << 20) == -EBADMSG);
    }
    std::ofstream(folder / "large") << std::string(8192, 'x');
    CHECK(read(folder / "large", into.base(), 4096) == -EFBIG);
    CHECK(read(folder / "large", into.base(), 8192) == 8192);
}

void test_refused_writes(const Folder& folder, lmkv::Slab& from) {
    const std::string tmp = folder / "taken", path = folder / "target";
    std::ofstream(tmp) << "somebody's";
    CHECK(write(tmp, path, from.base(), 4096) == -EEXIST);
    CHECK(fs::file_size(tmp) == 10 && !fs::exists(path));
    CHECK(write(folder / "no/tmp", path, from.base(), 4096) == -ENOENT);
    fs::create_directory(folder / "folder");
    CHECK(write(folder / "new", folder / "folder", from.base(), 4096) == -EISDIR);
    CHECK(write(folder / "new", folder / "no/file", from.base(), 4096) == -ENOENT);
    CHECK(!fs::exists(folder / "new"));
}

void test_a_file_size_limit(const Folder& folder, lmkv::Slab& from) {
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    const rlimit small{8192, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK(write(folder / "tmp", folder / "limited", from.base(), 1 << 20, false, {false, 4096, 4}) == -EFBIG);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    CHECK(!fs::exists(folder / "tmp") && !fs::exists(folder / "limited"));
}

void test_listing() {
    const Folder folder;
    std::vector<lmkv::DirEntry> entries;
    CHECK(lmkv::list_dir((folder / "missing").c_str(), entries) == -ENOENT);
    CHECK(lmkv::list_dir(folder.path.c_str(), entries) == 0 && entries.empty());
    fs::create_directory(folder / "folder");
    fs::create_symlink("/", folder / "link");
    for (int i = 0; i < 300; ++i)
        std::ofstream(folder / ("file" + std::to_string(i)).c_str()) << std::string(static_cast<std::size_t>(i), 'x');
    CHECK(lmkv::list_dir(folder.path.c_str(), entries) == 0 && entries.size() == 300);
    for (const auto& [name, size, mtime_ns] : entries) {
        CHECK(name == "file" + std::to_string(size));
        struct stat status;
        CHECK(::stat((folder / name.c_str()).c_str(), &status) == 0);
        CHECK(mtime_ns == status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec);
    }
}

// In a child with mounts of its own: a file system of 64 KiB, then the same read-only. 77: not allowed here.
int in_small_file_system(const std::string& folder, const char* from) {
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return 77;
    if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
    if (mount("lmkv", folder.c_str(), "tmpfs", 0, "size=64k,mode=0700") != 0) return 77;
    const std::string tmp = folder + "/tmp", path = folder + "/file";
    if (write(tmp, path, from, 4096) != 0) return 1;
    if (write(tmp, folder + "/big", from, 1 << 20, false, {false, 16384, 4}) != -ENOSPC) return 2;
    if (fs::exists(tmp) || fs::exists(folder + "/big")) return 3;
    if (mount("lmkv", folder.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr) != 0) return 77;
    return write(tmp, path, from, 4096) == -EROFS ? 0 : 4;
}

}  // namespace

void test_files() {
    const Folder folder;
    lmkv::Slab from(2 << 20, true), into(2 << 20, true);
    fill(from);
    test_round_trips(folder, from, into);
    test_refused_reads(folder, into);
    test_refused_writes(folder, from);
    test_a_file_size_limit(folder, from);
    test_listing();
}

void test_refusing_file_systems() {
    const Folder folder;
    lmkv::Slab from(1 << 20, true);
    fill(from);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(in_small_file_system(folder.path, from.base()));
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        std::printf("skipped: mounting a small file system is not allowed here\n");
    else
        CHECK(WEXITSTATUS(status) == 0);
}
