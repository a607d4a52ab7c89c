// Persistent threads that help a caller through a list of independent items.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

namespace lmkv {

// The calling thread always works too and can finish a job alone, so a job never waits for a free
// thread and a pool without threads is merely slower. Any number of callers may share a pool.
class Pool {
  public:
    explicit Pool(int limit) : limit_(limit) {}
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Calls body(i) once for every i in [0, items), on at most `threads` threads; body must not throw.
    template <typename Body>
    void run(std::size_t items, int threads, const Body& body) {
        run_items(
            items, threads, [](const void* state, std::size_t i) { (*static_cast<const Body*>(state))(i); }, &body);
    }

  private:
    struct Job;
    using Call = void (*)(const void* state, std::size_t item);

    void run_items(std::size_t items, int threads, Call call, const void* state);
    void add_threads();
    void serve();

    const int limit_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<Job*> wanted_;  // a job once for each helper it may still get
    int threads_ = 0;
    int busy_ = 0;  // threads inside a job
};

// One pool each, made at first use and never destroyed. A forked child gets new ones: the parent's
// threads do not exist there, and its mutex may have been copied while locked.
Pool& copy_pool();
Pool& io_pool();

}  // namespace lmkv
