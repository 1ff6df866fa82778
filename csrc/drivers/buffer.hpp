// Uninitialised memory on cache-line boundaries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace mdmi {

constexpr std::size_t kCacheLine = 64;

struct FreeAligned {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(kCacheLine)); }
};

template <class T>
using Buffer = std::unique_ptr<T[], FreeAligned>;

template <class T>
Buffer<T> make_buffer(std::size_t n) {
  if (n > PTRDIFF_MAX / sizeof(T) - kCacheLine) throw std::bad_array_new_length();
  return Buffer<T>(static_cast<T*>(::operator new(n * sizeof(T) + kCacheLine, std::align_val_t(kCacheLine))));
}

}  // namespace mdmi
