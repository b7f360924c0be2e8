// Memory that a thread keeps; for the other headers.

#pragma once

#include <cstdint>
#include <vector>

namespace cpu {

// Memory that is kept from call to call, on a line of the cache.
template <typename T>
class Buffer {
 public:
  T* room(int64_t count) {
    if (int64_t(held_.size()) < count + 64) held_.resize(count + 64);
    return held_.data() + (64 - reinterpret_cast<uintptr_t>(held_.data()) % 64) / sizeof(T);
  }

 private:
  std::vector<T> held_;
};

}  // namespace cpu
