#include "drivers/stats.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/kernels.hpp"
#include "drivers/threads.hpp"

namespace mdmi {
namespace {

constexpr int64_t kElementsPerTask = 1 << 15;  // some ten microseconds of work

// work(begin, end, worker) on pieces of the rows that do not depend on the number of threads.
template <class Work>
void for_rows(int64_t n_rows, int64_t elements_per_row, int threads, Work work) {
  // Whole vectors of short rows: sixteen is a multiple of every target's lanes.
  const int64_t per_task = (std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, elements_per_row)) + 15) & ~15;
  const int64_t step = elements_per_row >= kElementsPerTask ? 1 : per_task;
  parallel_for((n_rows + step - 1) / step, threads,
               [&](int64_t task, int worker) { work(task * step, std::min(n_rows, (task + 1) * step), worker); });
}

// Room for two rows, and the states of K alternatives, for each thread.
class Rooms {
 public:
  Rooms(int64_t width, int64_t count, Dtype dtype, int threads)
      : bytes_(2 * ((width + 15) & ~int64_t(15)) * std::max<int64_t>(4, item_size(dtype)) + 64),
        count_(count),
        rows_(new char[size_t(bytes_ * threads)]),
        states_(size_t(count * threads)) {}

  void* row(int worker) { return rows_.get() + bytes_ * worker; }
  RowState* states(int worker) { return states_.data() + count_ * worker; }

 private:
  int64_t bytes_, count_;
  std::unique_ptr<char[]> rows_;
  std::vector<RowState> states_;
};

// Statistics of the rows that KL divergence is taken from.
class BaseRows {
 public:
  BaseRows(const Rows& rows, int64_t n_rows)
      : rows_(rows), top_(new double[size_t(n_rows)]), log_sum_(new double[size_t(n_rows)]) {}

  Base fill(int64_t width, int64_t begin, int64_t end) {
    StatsOut out;
    out.top = top_.get();
    out.log_sum = log_sum_.get();
    kernels().row_stats(rows_, width, begin, end, out);
    return {rows_, top_.get(), log_sum_.get()};
  }

 private:
  Rows rows_;
  std::unique_ptr<double[]> top_, log_sum_;
};

}  // namespace

void row_stats(const Rows& logits, int64_t n_rows, int64_t width, const StatsOut& out, int threads) {
  for_rows(n_rows, width, threads,
           [&](int64_t begin, int64_t end, int) { kernels().row_stats(logits, width, begin, end, out); });
}

void stats_backward(const Rows& logits, int64_t n_rows, int64_t width, const StatsGrad& grad, const RowsOut& d_logits,
                    int threads) {
  for_rows(n_rows, width, threads, [&](int64_t begin, int64_t end, int) {
    kernels().stats_backward(logits, width, begin, end, grad, d_logits);
  });
}

void absorb_tile(const Rows& tile, int64_t n_rows, int64_t width, int64_t first_token, RowState* states, int threads) {
  for_rows(n_rows, width, threads, [&](int64_t begin, int64_t end, int) {
    kernels().absorb_tile(tile, width, begin, end, first_token, states);
  });
}

void finish_rows(const RowState* states, int64_t n_rows, const StatsOut& out) {
  for (int64_t row = 0; row < n_rows; ++row) kernels().finish_row(states[row], row, out);
}

void stack_stats(const Stack& logits, const Rows* base, int64_t width, const StackOut& out, int threads) {
  BaseRows of_base(base == nullptr ? logits.rows : *base, base == nullptr ? 0 : logits.rows_per_k);
  Rooms rooms(width, logits.count, logits.rows.dtype, threads);
  for_rows(logits.rows_per_k, width * logits.count, threads, [&](int64_t begin, int64_t end, int worker) {
    const Base filled = base == nullptr ? Base{} : of_base.fill(width, begin, end);
    kernels().stack_rows(logits, filled, width, begin, end, out, rooms.row(worker), rooms.states(worker));
  });
}

void expected_kl_backward(const Stack& logits, const Rows& base, int64_t width, const double* grad,
                          const RowsOut& d_logits, const RowsOut& d_base, int threads) {
  BaseRows of_base(base, logits.rows_per_k);
  Rooms rooms(width, 0, base.dtype, threads);
  for_rows(logits.rows_per_k, width * logits.count, threads, [&](int64_t begin, int64_t end, int worker) {
    kernels().kl_backward(logits, of_base.fill(width, begin, end), width, begin, end, grad, d_logits, d_base,
                          rooms.row(worker));
  });
}

void mixture_entropy_backward(const Stack& logits, int64_t width, const double* grad, const RowsOut& d_logits,
                              int threads) {
  Rooms rooms(width, logits.count, logits.rows.dtype, threads);
  for_rows(logits.rows_per_k, width * logits.count, threads, [&](int64_t begin, int64_t end, int worker) {
    kernels().mixture_backward(logits, width, begin, end, grad, d_logits, rooms.row(worker), rooms.states(worker));
  });
}

}  // namespace mdmi
