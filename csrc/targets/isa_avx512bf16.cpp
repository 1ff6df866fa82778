// AVX-512 with the bfloat16 dot product: vectors of sixteen.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "drivers/dtype.hpp"
#include "kernels/kernels.hpp"

#define MDMI_TARGET "avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512bf16"
#include "targets/target_begin.inc"

namespace mdmi::avx512bf16 {
namespace {
#include "targets/simd512.inc"
}  // namespace
}  // namespace mdmi::avx512bf16

#define MDMI_BF16_DOT
#define MDMI_ISA avx512bf16
#include "kernels/kernels.inc"
#include "targets/target_end.inc"
#endif
