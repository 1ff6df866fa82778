// A small persistent pool. Work is cut into tasks by the caller, never by the number of threads, so that results are
// identical whatever that number is; threads only decide who runs which task.
#pragma once

#include <cstdint>

namespace mdmi {

// body(context, task, worker): worker is in [0, threads) and runs one task at a time, so it may own scratch memory.
using TaskBody = void (*)(void* context, int64_t task, int worker);

// Runs tasks 0 .. n_tasks-1 on at most `threads` threads, the caller being one of them. Rethrows the first exception.
// A call made while another one runs (a second Python thread, or a nested call) runs on the caller alone.
void run_tasks(int64_t n_tasks, int threads, TaskBody body, void* context);

// More than this many are never started: nobody has the processors, and each costs its scratch memory.
constexpr int kMostThreads = 1024;

inline int usable_threads(int64_t threads) {
  return int(threads < 1 ? 1 : threads > kMostThreads ? kMostThreads : threads);
}

template <class Body>
void parallel_for(int64_t n_tasks, int threads, Body&& body) {
  run_tasks(
      n_tasks, threads, [](void* context, int64_t task, int worker) { (*static_cast<Body*>(context))(task, worker); },
      static_cast<void*>(&body));
}

}  // namespace mdmi
