// A team of threads that works through the phases of one job, tile by tile.
//
// Tiles of a phase are handed out one at a time, and a phase is over when its tiles are done, not when every thread
// has arrived: a thread that the system took off its core costs the tile it holds, nothing else.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace dspark {

// One barrier-free stretch of work: run(tile, thread) for each tile in [0, tiles), in any order, by any thread.
struct Phase {
    int tiles = 0;
    std::function<void(int tile, int thread)> run;
};

class Pool {
  public:
    // `threads` includes the caller of `run`.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Run all phases, one after another. The caller works along; other callers wait for their turn.
    void run(const std::vector<Phase>& phases);

  private:
    struct alignas(64) Progress {
        std::atomic<int> next{0};
        std::atomic<int> done{0};
    };

    void member(int thread);
    void work(int thread);

    const int threads_;
    std::mutex turn_;
    const std::vector<Phase>* phases_ = nullptr;
    std::unique_ptr<Progress[]> progress_;
    size_t capacity_ = 0;

    std::atomic<uint64_t> job_{0};     // number of the latest job
    std::atomic<uint64_t> open_{0};    // the same while it may be joined, else 0
    std::atomic<int> inside_{0};       // members that are looking at the job
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> team_;
};

// The team of this process: executors of the same width share one, and row work borrows the latest.
std::shared_ptr<Pool> team(int threads);

// work(row) for each of n rows, on the latest team if there is one.
void by_rows(int n, const std::function<void(int row)>& work);

}  // namespace dspark
