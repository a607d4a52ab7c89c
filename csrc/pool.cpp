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
    void* state;
    std::size_t items;
    std::atomic<std::size_t> next{0};
    int wanted = 0;  // helpers that may still join; guarded by the pool's mutex, as is active
    int active = 0;
    Job* link = nullptr;

    void work() {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;)
            call(state, i);
    }
};

void Pool::run_items(std::size_t items, int threads, Call call, void* state) {
    Job job{call, state, items};
    const auto helpers =
        std::min<std::size_t>(items, static_cast<std::size_t>(std::clamp(threads, 1, limit_ + 1)));
    if (helpers <= 1) return job.work();
    {
        std::lock_guard lock(mutex_);
        job.wanted = static_cast<int>(helpers) - 1;
        wanted_ += job.wanted;
        Job** end = &first_;
        while (*end) end = &(*end)->link;
        *end = &job;
        add_threads();
    }
    wake_.notify_all();
    job.work();
    std::unique_lock lock(mutex_);
    unlink(&job);
    done_.wait(lock, [&] { return job.active == 0; });
}

void Pool::unlink(Job* job) {
    for (Job** at = &first_; *at; at = &(*at)->link) {
        if (*at != job) continue;
        *at = job->link;
        wanted_ -= job->wanted;
        job->wanted = 0;
        return;
    }
}

void Pool::add_threads() {
    sigset_t all, before;
    sigfillset(&all);
    // Signals belong to the interpreter's threads.
    int missing = wanted_ - (threads_ - busy_);
    if (missing <= 0 || pthread_sigmask(SIG_SETMASK, &all, &before) != 0) return;
    try {
        for (; missing > 0 && threads_ < limit_; --missing) {
            std::thread([this] { serve(); }).detach();
            ++threads_;
        }
    } catch (const std::system_error&) {
        // No more threads to be had: the caller does the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return first_ != nullptr; });
        Job* job = first_;
        ++busy_;
        --wanted_;
        if (--job->wanted == 0) first_ = job->link;
        ++job->active;
        lock.unlock();
        job->work();
        lock.lock();
        --busy_;
        if (--job->active == 0) done_.notify_all();
    }
}

namespace {

std::atomic<Pool*> copy_instance{nullptr};
std::atomic<Pool*> io_instance{nullptr};
std::atomic<bool> hooked{false};

void forget_pools() {
    copy_instance.store(nullptr);
    io_instance.store(nullptr);
}

Pool& instance(std::atomic<Pool*>& slot) {
    if (Pool* pool = slot.load(std::memory_order_acquire)) return *pool;
    if (!hooked.exchange(true)) pthread_atfork(nullptr, nullptr, forget_pools);
    Pool* made = new Pool(64);
    Pool* other = nullptr;
    if (slot.compare_exchange_strong(other, made)) return *made;
    delete made;
    return *other;
}

}  // namespace

Pool& copy_pool() {
    return instance(copy_instance);
}

Pool& io_pool() {
    return instance(io_instance);
}

}  // namespace lmkv
