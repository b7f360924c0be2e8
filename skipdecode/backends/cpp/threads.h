// How the threads of a parallel region share work; for the other headers.

#pragma once

#include <cstdint>

namespace cpu {

// work(0) .. work(count - 1), to be called by all threads of a parallel region, which wait for none at the end. Of most of
// it each thread has a part of its own, which it reads in one stream. The rest goes piece by piece to whoever is free, so
// that a thread from which the system takes its core for a moment, for another process, is not waited for. Each thread
// gets rising numbers.
template <typename Work>
inline void share(int64_t count, Work work) {
  const int64_t own = count - count / 4, piece = count / 64 + 1;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < own; ++i) work(i);
#pragma omp for schedule(monotonic : dynamic, piece) nowait
  for (int64_t i = own; i < count; ++i) work(i);
}

// All threads of a parallel region, or one of them that works alone.
struct Team {
  bool is_alone;

  template <typename Work>
  void share(int64_t count, Work work) const {
    if (is_alone)
      for (int64_t i = 0; i < count; ++i) work(i);
    else
      cpu::share(count, work);
  }

  // The same in as many even parts as there are threads.
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
