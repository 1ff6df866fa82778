// What the kernels on rows of logits exchange with their drivers.
#pragma once

#include <cstdint>

#include "drivers/dtype.hpp"

namespace mdmi {

// Logits of any two leading strides, the last axis contiguous: row r starts at element
// (r / inner) * stride_outer + (r % inner) * stride_inner.
struct Rows {
  const void* data;
  Dtype dtype;
  int64_t inner, stride_outer, stride_inner;
};

// K alternatives of the same rows. weights [count, rows_per_k] is contiguous; null means that every weight is 1.
struct Stack {
  Rows rows;  // of k = 0
  int64_t count, stride_k, rows_per_k;
  const double* weights;

  Rows rows_of(int64_t k) const {
    Rows shifted = rows;
    shifted.data = static_cast<const char*>(rows.data) + k * stride_k * item_size(rows.dtype);
    return shifted;
  }
  double weight(int64_t k, int64_t row) const { return weights == nullptr ? 1.0 : weights[k * rows_per_k + row]; }
};

struct RowsOut {  // contiguous
  void* data;
  Dtype dtype;
};

// A row seen in part: d = x - top, sum of e^d, weighted sum of e^d d; token is the first index of top, second the
// next largest logit.
struct RowState {
  double top = -__builtin_inf(), sum = 0.0, weighted = 0.0, second = -__builtin_inf();
  int64_t token = 0;
};

struct StatsOut {  // each [rows] or null; top and log_sum are what other kernels need of a row, NaN where undefined
  float *entropy = nullptr, *logsumexp = nullptr, *confidence = nullptr, *margin = nullptr;
  int64_t* token = nullptr;
  double *top = nullptr, *log_sum = nullptr;
};

struct StatsGrad {  // each [rows] or null
  const double *entropy = nullptr, *logsumexp = nullptr, *confidence = nullptr, *margin = nullptr;
};

// What KL divergence is taken from; top and log_sum are what row_stats says of its rows, NaN where they are undefined.
struct Base {
  Rows rows;
  const double *top, *log_sum;
};

struct StackOut {  // [rows] or null: entropy of the mixture, weighted sums of the entropies and of the KL divergences
  float *mixture = nullptr, *entropy = nullptr, *kl = nullptr;
};

}  // namespace mdmi
