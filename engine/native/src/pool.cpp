#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define DSPARK_PAUSE() _mm_pause()
#else
#define DSPARK_PAUSE() std::atomic_signal_fence(std::memory_order_seq_cst)
#endif

namespace dspark {

namespace {
// About 100 microseconds: long enough to bridge the gap between two steps of the engine on a small model, short enough
// that an idle server burns nothing.
constexpr int kSpinsBeforeSleep = 4000;
// Inside a job, a member that waits for others gives its core away after this, in case the one it waits for needs it.
constexpr int kSpinsBeforeYield = 2000;
}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    for (int i = 1; i < threads_; ++i) team_.emplace_back([this, i] { member(i); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : team_) thread.join();
}

void Pool::run(const std::vector<Phase>& phases) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (capacity_ < phases.size()) {
        progress_ = std::make_unique<Progress[]>(phases.size());
        capacity_ = phases.size();
    }
    for (size_t i = 0; i < phases.size(); ++i) {
        progress_[i].next.store(0, std::memory_order_relaxed);
        progress_[i].done.store(0, std::memory_order_relaxed);
    }
    phases_ = &phases;
    const uint64_t job = job_.load() + 1;
    open_.store(job);
    job_.store(job);
    if (sleeping_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    work(0);
    // Nobody may join from now on, and the job's memory is ours again once those inside have left.
    open_.store(0);
    while (inside_.load() > 0) DSPARK_PAUSE();
}

void Pool::work(int thread) {
    const std::vector<Phase>& phases = *phases_;
    for (size_t i = 0; i < phases.size(); ++i) {
        const int tiles = phases[i].tiles;
        Progress& progress = progress_[i];
        for (int tile; (tile = progress.next.fetch_add(1, std::memory_order_relaxed)) < tiles;) {
            phases[i].run(tile, thread);
            progress.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; progress.done.load(std::memory_order_acquire) < tiles;) {
            DSPARK_PAUSE();
            if (++spins > kSpinsBeforeYield) {
                std::this_thread::yield();
                spins = 0;
            }
        }
    }
}

void Pool::member(int thread) {
    uint64_t seen = 0;
    while (!stop_.load()) {
        int spins = 0;
        while (job_.load(std::memory_order_acquire) == seen && spins < kSpinsBeforeSleep) {
            DSPARK_PAUSE();
            ++spins;
        }
        if (job_.load() == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            ++sleeping_;
            wake_.wait(lock, [&] { return stop_.load() || job_.load() != seen; });
            --sleeping_;
            if (stop_.load()) return;
        }
        seen = job_.load();
        ++inside_;
        if (open_.load() == seen) work(thread);
        --inside_;
    }
}

namespace {
std::mutex latest_mutex;
std::weak_ptr<Pool> latest;
}  // namespace

std::shared_ptr<Pool> team(int threads) {
    const std::lock_guard<std::mutex> lock(latest_mutex);
    std::shared_ptr<Pool> pool = latest.lock();
    if (!pool || pool->threads() != threads) latest = pool = std::make_shared<Pool>(threads);
    return pool;
}

void by_rows(int n, const std::function<void(int row)>& work) {
    std::shared_ptr<Pool> pool;
    if (n > 1) {
        const std::lock_guard<std::mutex> lock(latest_mutex);
        pool = latest.lock();
    }
    if (pool) {
        pool->run({{n, [&](int row, int) { work(row); }}});
    } else {
        for (int row = 0; row < n; ++row) work(row);
    }
}

}  // namespace dspark
