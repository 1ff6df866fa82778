// The network that scores a pair, as its kernels want it: widths filled up to whole vectors, weights in panels.
#pragma once

#include <cstdint>

namespace mdmi {

struct DenseLayer {
  int64_t in, out;
  const float* panels;  // see pack_layer in kernels.hpp
  const float* bias;    // filled up with 0, as w_out below
};

// z = relu(u_i + v_j), or u_i * v_j; each layer z = relu(z W + b); the score is activation(z w_out + b_out + shift).
struct PairNetwork {
  int64_t width;  // of u and v
  bool multiply, softplus, bf16;
  int64_t n_layers;
  const DenseLayer* layers;
  const float* w_out;
  float b_out;
  int64_t widest;  // of all z, filled up

  int64_t operations() const {  // multiply-adds of one pair
    int64_t n = width;
    for (int64_t k = 0; k < n_layers; ++k) n += layers[k].in * layers[k].out;
    return n;
  }
};

// Activations z and gradients d of a chunk of pairs, for each level from the combined halves to the last layer:
// [pairs, stride[level]]. grad [pairs] comes in for the scores; shift [pairs] is added to them, null: nothing.
struct PairTape {
  float *const *z, *const *d;
  const int64_t* stride;
  float* grad;
  const float* shift;
};

}  // namespace mdmi
