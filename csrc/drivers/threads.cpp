#include "drivers/threads.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace mdmi {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waking a sleeping thread costs tens of microseconds, as much as scoring a small board: wait this many pauses before
// sleeping.
constexpr int kSpins = 4000;

struct Job {
  TaskBody body;
  void* context;
  int64_t n_tasks;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // written by whoever set `failed` first

  void run(int worker) noexcept {
    for (int64_t task = next.fetch_add(1); task < n_tasks; task = next.fetch_add(1)) {
      try {
        body(context, task, worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        next.store(n_tasks);
      }
    }
  }
};

class Pool {
 public:
  // False when the pool is at work for somebody else.
  bool try_run(Job& job, int threads) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      helpers_wanted_ = threads - 1;
      busy_.store(threads - 1);
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    job.run(0);
    for (int spin = 0; busy_.load() != 0; ++spin) {
      if (spin < kSpins) {
        relax();
      } else {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return busy_.load() == 0; });
      }
    }
    return true;
  }

 private:
  void grow(int helpers) {
    while (int(workers_.size()) < helpers) {
      const int index = int(workers_.size());
      workers_.emplace_back([this, index, seen = generation_.load()] { serve(index, seen); });
      workers_.back().detach();
    }
  }

  void serve(int index, uint64_t seen) {
    for (;;) {
      for (int spin = 0; generation_.load() == seen && spin < kSpins; ++spin) relax();
      Job* job;
      bool wanted;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        seen = generation_.load();
        wanted = index < helpers_wanted_;
        job = job_;
      }
      if (!wanted) continue;
      job->run(index + 1);
      std::lock_guard<std::mutex> lock(mutex_);
      if (busy_.fetch_sub(1) == 1) done_.notify_one();
    }
  }

  std::mutex owner_;  // held by the thread whose job the pool runs
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int helpers_wanted_ = 0;
  std::atomic<int> busy_{0};
  std::atomic<uint64_t> generation_{0};
};

// Never destroyed: workers may outlive static destruction. Replaced in the child of a fork, where the workers do not
// exist and the locks are in an unknown state.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static const bool registered = [] {
    current_pool.store(new Pool);
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] { current_pool.store(new Pool); });
#endif
    return true;
  }();
  (void)registered;
  return *current_pool.load();
}

}  // namespace

void run_tasks(int64_t n_tasks, int threads, TaskBody body, void* context) {
  if (n_tasks < threads) threads = int(n_tasks);
  if (n_tasks <= 0) return;
  Job job;
  job.body = body;
  job.context = context;
  job.n_tasks = n_tasks;
  if (threads <= 1 || !pool().try_run(job, threads)) job.run(0);
  if (job.failed) std::rethrow_exception(job.error);
}

}  // namespace mdmi
