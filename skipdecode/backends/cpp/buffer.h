// Scratch memory that a thread keeps between calls; for the other headers.

#pragma once

#include <cstdint>
#include <vector>

namespace cpu {

// Uninitialised memory, aligned to a cache line, that grows and is never released.
template <typename T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    if (int64_t(held_.size()) < count + 64) held_.resize(count + 64);
    return held_.data() + (64 - reinterpret_cast<uintptr_t>(held_.data()) % 64) / sizeof(T);
  }

 private:
  std::vector<T> held_;
};

}  // namespace cpu
