// Entropy, token statistics and KL divergence of rows of logits, one read of them each; see rows.hpp for the operands.
#pragma once

#include <cstdint>

#include "rows.hpp"

namespace mdmi {

void row_stats(const Rows& logits, int64_t n_rows, int64_t width, const StatsOut& out, int threads);
void stats_backward(const Rows& logits, int64_t n_rows, int64_t width, const StatsGrad& grad, const RowsOut& d_logits,
                    int threads);

// For logits that exist one tile of columns at a time: absorb all tiles, then finish.
void absorb_tile(const Rows& tile, int64_t n_rows, int64_t width, int64_t first_token, RowState* states, int threads);
void finish_rows(const RowState* states, int64_t n_rows, const StatsOut& out);

// sum_k w_k H(logits_k) and sum_k w_k KL(logits_k || base), in the order of k; a weight of 0 adds 0.
void expected_entropy(const Stack& logits, int64_t width, float* out, int threads);
void expected_kl(const Stack& logits, const Rows& base, int64_t width, float* out, int threads);
void expected_kl_backward(const Stack& logits, const Rows& base, int64_t width, const double* grad,
                          const RowsOut& d_logits, const RowsOut& d_base, int threads);

void mixture_entropy(const Stack& logits, int64_t width, const MixtureOut& out, int threads);
void mixture_entropy_backward(const Stack& logits, int64_t width, const double* grad, const RowsOut& d_logits,
                              int threads);

}  // namespace mdmi
