// What comes from outside, by mdmi_fast.h or from Python: sizes whose products must not overflow, addresses that must
// be those of arrays. Each message names the function and the argument.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace mdmi {

using Sizes = std::initializer_list<int64_t>;

[[noreturn]] inline void refuse(const char* function, const std::string& message) {
  throw std::invalid_argument(std::string(function) + ": " + message);
}

inline std::string listed(Sizes sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// How many elements an array of these sizes has; none of them may be negative, and 8 bytes each must be countable.
inline int64_t count_of(const char* function, const char* name, Sizes sizes) {
  int64_t count = 1;
  bool empty = false, countable = true;
  for (int64_t size : sizes) {
    if (size < 0) refuse(function, std::string(name) + " must have sizes of at least 0, got " + listed(sizes));
    empty = empty || size == 0;
    countable = countable && !__builtin_mul_overflow(count, size, &count);
  }
  if (empty) return 0;
  if (!countable || count > INT64_MAX / 8)
    refuse(function, std::string(name) + " must fit into memory, got sizes " + listed(sizes));
  return count;
}

// Positions are numbered in 32 bits.
inline void require_positions(const char* function, int64_t n) {
  if (n < 0 || n > INT32_MAX) refuse(function, "n must lie in 0..2147483647, got " + std::to_string(n));
}

// An array of elements of this many bytes. Without elements it may be anywhere.
template <class T>
T* array(const char* function, const char* name, T* address, Sizes sizes, uintptr_t item) {
  if (count_of(function, name, sizes) == 0) return address;
  if (address == nullptr)
    refuse(function, std::string(name) + " must be an array of sizes " + listed(sizes) + ", got NULL");
  if (reinterpret_cast<uintptr_t>(address) % item != 0)
    refuse(function, std::string(name) + " must begin at a multiple of " + std::to_string(item) + " bytes, got " +
                         std::to_string(reinterpret_cast<uintptr_t>(address)));
  return address;
}

template <class T>
T* array(const char* function, const char* name, T* address, Sizes sizes) {
  return array(function, name, address, sizes, sizeof(T));
}

// The same, or NULL.
template <class T>
T* array_or_null(const char* function, const char* name, T* address, Sizes sizes) {
  return address == nullptr ? nullptr : array(function, name, address, sizes);
}

}  // namespace mdmi
