// Entropy, token statistics and KL divergence of rows of logits, one read of them each; see rows.hpp for the operands.
#pragma once

#include <cstdint>

#include "drivers/rows.hpp"

namespace mdmi {

void row_stats(const Rows& logits, int64_t n_rows, int64_t width, const StatsOut& out, int threads);
void stats_backward(const Rows& logits, int64_t n_rows, int64_t width, const StatsGrad& grad, const RowsOut& d_logits,
                    int threads);

// For logits that exist one tile of columns at a time: absorb all tiles, then finish.
void absorb_tile(const Rows& tile, int64_t n_rows, int64_t width, int64_t first_token, RowState* states, int threads);
void finish_rows(const RowState* states, int64_t n_rows, const StatsOut& out);

// H(sum_k w_k softmax(logits_k)), sum_k w_k H(logits_k) and sum_k w_k KL(logits_k || base), as far as `out` asks for
// them; a weight of 0 adds 0. The base may be null where no KL divergence is asked for.
void stack_stats(const Stack& logits, const Rows* base, int64_t width, const StackOut& out, int threads);
void expected_kl_backward(const Stack& logits, const Rows& base, int64_t width, const double* grad,
                          const RowsOut& d_logits, const RowsOut& d_base, int threads);
void mixture_entropy_backward(const Stack& logits, int64_t width, const double* grad, const RowsOut& d_logits,
                              int threads);

}  // namespace mdmi
