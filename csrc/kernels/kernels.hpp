// One table of kernels per instruction set. Drivers (select.cpp, stats.cpp, ...) are compiled once for the oldest
// processor and reach the fast code only through the table that suits the processor they run on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "drivers/pair_network.hpp"
#include "drivers/rows.hpp"

namespace mdmi {

// Row kernels work on rows [begin, end) of width elements.
struct Kernels {
  const char* isa;

  // Twelve chains of `rounds` multiply-adds each, as many as hide their latency: the most this processor can do.
  // Returns the operations done.
  int64_t (*fma_burst)(int64_t rounds);

  bool (*any_nan_f32)(const float* x, int64_t n);

  void (*row_stats)(const Rows& logits, int64_t width, int64_t begin, int64_t end, const StatsOut& out);
  // Columns first_token .. first_token + width of every row join its state.
  void (*absorb_tile)(const Rows& tile, int64_t width, int64_t begin, int64_t end, int64_t first_token,
                      RowState* states);
  void (*finish_row)(const RowState& state, int64_t row, const StatsOut& out);
  void (*stats_backward)(const Rows& logits, int64_t width, int64_t begin, int64_t end, const StatsGrad& grad,
                         const RowsOut& d_logits);

  // pair_rows pairs at a time; left and right point to rows of u and v, shifts (null: none) has room for whole vectors,
  // scratch holds 2 * pair_rows * widest floats.
  int pair_rows;
  int64_t (*slots_of)(int64_t n, bool bf16);
  // W [in, out] as slots_of(in) * (out filled up to whole vectors) floats; in bfloat16 two rows may share a float.
  void (*pack_layer)(const float* weight, int64_t in, int64_t out, bool bf16, float* panels);
  void (*pair_scores)(const PairNetwork& net, const float* const* left, const float* const* right, const float* shifts,
                      float* scores, float* scratch);
  // pair_rows rows through the layers, ReLU between them; scratch as for pair_scores.
  void (*mlp_rows)(const DenseLayer* layers, int64_t n_layers, const float* const* x, float* const* out, float* scratch,
                   int64_t widest);

  // The backward pass; see pairwise_backward.inc.
  void (*tape_pairs)(const PairNetwork& net, const DenseLayer* transposed, const float* const* left,
                     const float* const* right, const PairTape& tape, int64_t at);
  void (*add_products)(const float* z, int64_t z_stride, const float* d, int64_t d_stride, int64_t n_pairs,
                       int64_t begin, int64_t end, float* sums);
  void (*add_rows)(const float* x, int64_t stride, const float* weight, int64_t n_pairs, float* sums);
  void (*add_to_halves)(const PairTape& tape, const float* const* left, const float* const* right, float* const* d_left,
                        float* const* d_right, int64_t n_pairs, bool multiply, int64_t begin, int64_t end);

  // scratch: room for two rows, filled up to 16 elements; states: one per alternative. Both belong to one thread.
  void (*stack_rows)(const Stack& logits, const Base& base, int64_t width, int64_t begin, int64_t end,
                     const StackOut& out, void* scratch, RowState* states);
  void (*kl_backward)(const Stack& p, const Base& q, int64_t width, int64_t begin, int64_t end, const double* grad,
                      const RowsOut& d_p, const RowsOut& d_q, void* scratch);
  void (*mixture_backward)(const Stack& logits, int64_t width, int64_t begin, int64_t end, const double* grad,
                           const RowsOut& d_logits, void* scratch, RowState* states);
};

// The table in use: the best this processor and operating system support, or the one MDMI_FORCE_ISA names. Chosen at
// the first call; throws std::runtime_error when the forced one is unknown or cannot run here.
const Kernels& kernels();

std::vector<std::string> supported_isas();  // best last

extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512bf16;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

}  // namespace mdmi
