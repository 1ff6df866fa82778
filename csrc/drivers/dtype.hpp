// Element types that may cross the boundary, and the half-precision conversions that every target can do.
#pragma once

#include <cstdint>
#include <cstring>

namespace mdmi {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3 };

inline int64_t item_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
      return 8;
    case Dtype::f32:
      return 4;
    default:
      return 2;
  }
}

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bf16(uint16_t half) { return float_from_bits(uint32_t(half) << 16); }

// Round to nearest even; NaN stays NaN (rounding up could carry it into infinity).
inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_from_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Moving the 15 bits under a float's exponent scales by 2^-112, exactly, subnormals included.
  return float_from_bits(sign | bits_from_float(float_from_bits(magnitude << 13) * 0x1p112f));
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f16_from_float(float value) {
  const uint32_t bits = bits_from_float(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return uint16_t(sign | (bits_from_float(shifted) - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

}  // namespace mdmi
