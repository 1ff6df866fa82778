// Rows through a few dense layers, ReLU between them; a row's result does not depend on the others.
#pragma once

#include <cstdint>

#include "drivers/pairwise.hpp"

namespace mdmi {

// Row r of the input begins at x + (r / inner) * outer_stride + (r % inner) * inner_stride and is contiguous.
struct InputRows {
  const float* x;
  int64_t rows, inner, outer_stride, inner_stride;
};

// out [rows, width of the last layer], contiguous.
void mlp(const PackedNetwork& network, const InputRows& input, float* out, int threads);

}  // namespace mdmi
