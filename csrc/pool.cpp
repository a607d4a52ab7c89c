#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

namespace lmkv {

struct Pool::Job {
    Call call;
    const void* state;
    std::size_t items;
    std::atomic<std::size_t> next{0};
    int active = 0;  // helpers at work; guarded by the pool's mutex

    void work() {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) call(state, i);
    }
};

void Pool::run_items(std::size_t items, int threads, Call call, const void* state) {
    Job job{call, state, items};
    const auto workers = std::min(items, static_cast<std::size_t>(std::clamp(threads, 1, limit_)));
    if (workers <= 1) return job.work();
    {
        std::lock_guard lock(mutex_);
        wanted_.insert(wanted_.end(), workers - 1, &job);
        add_threads();
    }
    wake_.notify_all();
    job.work();
    std::unique_lock lock(mutex_);
    std::erase(wanted_, &job);
    done_.wait(lock, [&] { return job.active == 0; });
}

void Pool::add_threads() {
    int missing = static_cast<int>(wanted_.size()) - (threads_ - busy_);
    sigset_t all, before;
    sigfillset(&all);
    // Signals belong to the interpreter's threads.
    if (missing <= 0 || pthread_sigmask(SIG_SETMASK, &all, &before) != 0) return;
    try {
        for (; missing > 0 && threads_ < limit_; --missing, ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
        // No more threads to be had: the caller does the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::serve() {
    for (std::unique_lock lock(mutex_);;) {
        wake_.wait(lock, [&] { return !wanted_.empty(); });
        Job* const job = wanted_.front();
        wanted_.erase(wanted_.begin());
        ++busy_, ++job->active;
        lock.unlock();
        job->work();
        lock.lock();
        --busy_;
        if (--job->active == 0) done_.notify_all();
    }
}

namespace {

std::atomic<Pool*> copies{nullptr}, io{nullptr};
std::atomic<bool> hooked{false};

Pool& instance(std::atomic<Pool*>& slot) {
    if (Pool* pool = slot.load()) return *pool;
    if (!hooked.exchange(true)) {
        pthread_atfork(nullptr, nullptr, [] {
            copies.store(nullptr);
            io.store(nullptr);
        });
    }
    Pool* const made = new Pool(64);
    Pool* other = nullptr;
    if (slot.compare_exchange_strong(other, made)) return *made;
    delete made;
    return *other;
}

}  // namespace

Pool& copy_pool() { return instance(copies); }

Pool& io_pool() { return instance(io); }

}  // namespace lmkv
