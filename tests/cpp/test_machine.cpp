// Slabs, the thread pool, and both in a forked child.
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "memory.h"
#include "pool.h"

namespace {

constexpr std::size_t kMiB = 1 << 20;

void test_slab_is_aligned_and_zero() {
    for (const bool huge : {false, true}) {
        lmkv::Slab slab(5 * kMiB + 1, huge);
        CHECK(reinterpret_cast<std::uintptr_t>(slab.base()) % (2 * kMiB) == 0);
        CHECK(slab.nbytes() >= 5 * kMiB + 1 && slab.nbytes() % 4096 == 0);
        CHECK(slab.base()[0] == 0 && slab.base()[slab.nbytes() - 1] == 0);
    }
}

void test_slabs_of_a_file_share_it() {
    const int fd = memfd_create("test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 4 * kMiB) == 0);
    lmkv::Slab one(4 * kMiB, true, fd), two(2 * kMiB, false, fd);
    bool refused = false;
    try {
        lmkv::Slab longer(4 * kMiB + 1, true, fd);
    } catch (const std::bad_alloc&) {
        refused = true;
    }
    CHECK(refused);
    close(fd);
    CHECK(reinterpret_cast<std::uintptr_t>(two.base()) % (2 * kMiB) == 0);
    CHECK(one.touch(0, one.nbytes()) == 0);
    one.base()[5] = 7;
    CHECK(two.base()[5] == 7);
    one.close();
    CHECK(two.base()[5] == 7);
}

void test_touch_keeps_bytes_beside_a_writer() {
    lmkv::Slab slab(8 * kMiB, false);
    std::memset(slab.base(), 3, kMiB);
    std::thread writer([&] { std::memset(slab.base() + kMiB, 7, 7 * kMiB); });
    CHECK(slab.touch(5, slab.nbytes()) == 0);
    writer.join();
    CHECK(std::memchr(slab.base(), 0, slab.nbytes()) == nullptr);
    CHECK(slab.base()[kMiB - 1] == 3 && slab.base()[kMiB] == 7);
}

void test_close_waits_for_no_touch() {
    lmkv::Slab slab(64 * kMiB, false);
    std::thread toucher([&] {
        const int result = slab.touch(0, slab.nbytes());
        CHECK(result == 0 || result == -EBADF);
    });
    slab.close();
    slab.close();
    toucher.join();
    CHECK(slab.touch(0, 1) == -EBADF);
}

bool every_item_once(int threads) {
    std::vector<std::atomic<int>> seen(1000);
    lmkv::copy_pool().run(seen.size(), threads, [&](std::size_t i) { seen[i].fetch_add(1); });
    for (const auto& count : seen)
        if (count.load() != 1) return false;
    return true;
}

void test_jobs_run_every_item_once() {
    for (const int threads : {1, 2, 5, 1000}) CHECK(every_item_once(threads));
    lmkv::copy_pool().run(0, 4, [](std::size_t) { CHECK(false); });
    std::vector<std::thread> callers;
    std::atomic<int> good{0};
    for (int i = 0; i < 4; ++i)
        callers.emplace_back([&] {
            for (int round = 0; round < 50; ++round) good += every_item_once(3);
        });
    for (std::thread& caller : callers) caller.join();
    CHECK(good == 200);
}

void test_a_forked_child_has_its_own_threads() {
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop) every_item_once(3);  // so that the fork finds the pool's mutex in any state
    });
    for (int round = 0; round < 20; ++round) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            _exit(every_item_once(3) ? 0 : 1);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    stop = true;
    busy.join();
}

}  // namespace

void test_memory() {
    test_slab_is_aligned_and_zero();
    test_slabs_of_a_file_share_it();
    test_touch_keeps_bytes_beside_a_writer();
    test_close_waits_for_no_touch();
}

void test_pool() {
    test_jobs_run_every_item_once();
    test_a_forked_child_has_its_own_threads();
}
