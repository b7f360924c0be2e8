// How the threads of a parallel region share work; for the other headers.

#pragma once

#include <cstdint>

namespace cpu {

// Runs work(0) .. work(count - 1); called by all threads of a parallel region, without a barrier at the end. Three
// quarters are split statically, so that each thread reads one stream; the rest is handed out dynamically, so that nobody
// waits for a thread whose core the system has given to another process. Each thread gets rising numbers.
template <typename Work>
inline void share(int64_t count, Work work) {
  const int64_t own = count - count / 4, piece = count / 64 + 1;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < own; ++i) work(i);
#pragma omp for schedule(monotonic : dynamic, piece) nowait
  for (int64_t i = own; i < count; ++i) work(i);
}

// All threads of a parallel region, or a single one that works alone.
struct Team {
  bool is_alone;

  template <typename Work>
  void share(int64_t count, Work work) const {
    if (is_alone)
      for (int64_t i = 0; i < count; ++i) work(i);
    else
      cpu::share(count, work);
  }

  // Like `share`, but split evenly among the threads.
  template <typename Work>
  void each(int64_t count, Work work) const {
    if (is_alone) {
      for (int64_t i = 0; i < count; ++i) work(i);
    } else {
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < count; ++i) work(i);
    }
  }

  void wait() const {
    if (!is_alone) {
#pragma omp barrier
    }
  }
};

}  // namespace cpu
