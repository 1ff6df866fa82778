// Gradients of pairwise.hpp's scores with respect to u, v and the network, by recomputing instead of storing.
#pragma once

#include <cstdint>
#include <vector>

#include "drivers/pairwise.hpp"

namespace mdmi {

struct NetworkWeights {
  std::vector<LayerWeights> layers;
  const float* w_out;
  int64_t last_width;
  float b_out;
  bool bf16;
};

// Contiguous float32, fully written: u and v [batch, n, width], the others of the shape of what they belong to.
struct PairGradients {
  float *u, *v;
  std::vector<float*> weights, biases;
  float *w_out, *b_out;
  float* shift;  // null without one
};

// grad has the shape of the result of score_all, score_rows or score_band.
void score_all_backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, const float* grad,
                        const PairGradients& out, int threads);
void score_rows_backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, const int64_t* rows,
                         int64_t n_rows, const float* grad, const PairGradients& out, int threads);
void score_band_backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, int64_t window,
                         const float* grad, const PairGradients& out, int threads);

}  // namespace mdmi
