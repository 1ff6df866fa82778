// Scores of pairs of positions by a small network; see pair_network.hpp for the network.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "drivers/buffer.hpp"
#include "drivers/dtype.hpp"
#include "drivers/pair_network.hpp"

namespace mdmi {

struct LayerWeights {  // contiguous float32
  const float *weight, *bias;
  int64_t in, out;
};

// A network's weights in the layout of the kernels; made once, used for any number of calls.
class PackedNetwork {
 public:
  PackedNetwork(const std::vector<LayerWeights>& layers, const float* w_out, int64_t last_width, float b_out,
                bool bf16);
  PackedNetwork(const PackedNetwork&) = delete;
  PackedNetwork& operator=(const PackedNetwork&) = delete;

  const std::vector<DenseLayer>& layers() const { return layers_; }
  PairNetwork view(int64_t width, bool multiply, bool softplus) const;

 private:
  std::vector<DenseLayer> layers_;
  Buffer<float> storage_;
  const float* w_out_;
  float b_out_;
  bool bf16_;
};

// What is added to the score of a pair by its relation, 0 .. count - 1: that of positions (i, j) of sequence b is
// relation[b * stride_b + i * n + j] or, without one, the distance: min(|i - j|, count) - 1.
struct PairShift {
  const float* values = nullptr;  // null: nothing is added
  int64_t count = 0;
  const int32_t* relation = nullptr;
  int64_t stride_b = 0;
};

// u or v: [batch, n, width], the last axis contiguous.
struct Halves {
  const void *u, *v;
  Dtype u_dtype, v_dtype;
  int64_t u_stride_b, u_stride_n, v_stride_b, v_stride_n;
  int64_t batch, n, width;
  const uint8_t* mask;  // null: every position is masked
  int64_t mask_stride_b, mask_stride_n;
  PairShift shift = {};

  bool equal() const { return u == v && u_dtype == v_dtype && u_stride_b == v_stride_b && u_stride_n == v_stride_n; }
  bool symmetric() const { return equal() && shift.relation == nullptr; }  // f_ij = f_ji, whatever the network
};

enum class Symmetry : int { none = 0, mean = 1, upper = 2 };

struct PairRule {
  Symmetry symmetry;
  bool multiply, softplus;
};

// `out` [batch, n, n], [batch, n_rows, n] and [batch, n, 2 * window + 1], contiguous: every element is written.
void score_all(const PackedNetwork& network, const Halves& halves, const PairRule& rule, float* out, int threads);
void score_rows(const PackedNetwork& network, const Halves& halves, const PairRule& rule, const int64_t* rows,
                int64_t n_rows, float* out, int threads);
void score_band(const PackedNetwork& network, const Halves& halves, const PairRule& rule, int64_t window, float* out,
                int threads);

}  // namespace mdmi
