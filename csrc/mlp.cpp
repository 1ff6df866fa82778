#include "mlp.hpp"

#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "threads.hpp"

namespace mdmi {

void mlp(const PackedNetwork& network, const InputRows& input, float* out, int threads) {
  constexpr int64_t kRowsPerTask = 480;
  constexpr int kMaxRows = 16;
  const Kernels& k = kernels();
  const DenseLayer& first = network.layers().front();
  const PairNetwork net = network.view(first.in, false, false);
  const int64_t width = network.layers().back().out;
  const int64_t n_tasks = (input.rows + kRowsPerTask - 1) / kRowsPerTask;
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, n_tasks)));
  std::vector<Buffer<float>> scratch;
  for (int worker = 0; worker < workers; ++worker)
    scratch.push_back(make_buffer<float>(size_t((2 * net.widest + width) * k.pair_rows)));
  parallel_for(n_tasks, workers, [&](int64_t task, int worker) {
    float* const surplus = scratch[size_t(worker)].get() + 2 * net.widest * k.pair_rows;
    const int64_t end = std::min(input.rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; row += k.pair_rows) {
      const float* from[kMaxRows];
      float* to[kMaxRows];
      for (int64_t r = 0; r < k.pair_rows; ++r) {
        const int64_t at = std::min(row + r, end - 1);  // a tile is always full
        from[r] = input.x + at / input.inner * input.outer_stride + at % input.inner * input.inner_stride;
        to[r] = row + r < end ? out + at * width : surplus + r * width;
      }
      k.mlp_rows(net.layers, net.n_layers, from, to, scratch[size_t(worker)].get(), net.widest);
    }
  });
}

}  // namespace mdmi
