// Work in turns that several threads take.

#ifndef PEAGLE_TURNS_H_
#define PEAGLE_TURNS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Threads that share some work: each has at least `least` of it, and one where there is no pool.
inline int64_t NumThreads(const xla::ffi::ThreadPool& pool, int64_t work, int64_t least) {
  return std::max<int64_t>(1, std::min(pool.num_threads(), work / least));
}

// Calls turn(0) to turn(num_turns - 1), and returns when all are done. Other threads of XLA's pool
// that have nothing else to do take some of them. The calling thread takes turns, too, so that it never
// waits for a thread that has not begun. One that begins too late finds no turn, and reads nothing
// that `turn` refers to.
template <typename Turn>
void TakeTurns(xla::ffi::ThreadPool& pool, int64_t num_turns, int64_t num_threads,
               const Turn& turn) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto state = std::make_shared<State>();
  const auto take = [state, num_turns, &turn] {
    for (int64_t i; (i = state->next.fetch_add(1)) < num_turns;) {
      turn(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min(num_turns, num_threads); ++i) pool.Schedule([take] { take(); });
  take();
  while (state->done.load(std::memory_order_acquire) < num_turns) Pause();
}

#endif  // PEAGLE_TURNS_H_
