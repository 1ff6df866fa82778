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

// Floats that a row is filled up to: whole vectors of every target.
constexpr int64_t kPadding = 16;
inline int64_t padded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

}  // namespace mdmi
