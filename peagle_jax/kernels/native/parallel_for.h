// A loop whose iterations several threads take.

#ifndef PEAGLE_PARALLEL_FOR_H_
#define PEAGLE_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Threads that share some work, each of which has at least `least` of it; 1 without a pool.
inline int64_t NumThreads(const xla::ffi::ThreadPool& pool, int64_t work, int64_t least) {
  return std::max<int64_t>(1, std::min(pool.num_threads(), work / least));
}

// Calls body(0) to body(count - 1), and returns when all are done. Threads of XLA's pool that have
// nothing else to do take some of them. The calling thread takes iterations, too, so that it never
// waits for a thread that has not begun. One that begins too late finds none left, and reads
// nothing that `body` refers to.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, int64_t num_threads,
                 const Body& body) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto state = std::make_shared<State>();
  const auto take = [state, count, &body] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      body(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min(count, num_threads); ++i) pool.Schedule([take] { take(); });
  take();
  // others compute for some microseconds more, or were interrupted by the system
  for (int i = 0; state->done.load(std::memory_order_acquire) < count; ++i)
    if (i > 10000) std::this_thread::yield();
}

#endif  // PEAGLE_PARALLEL_FOR_H_
