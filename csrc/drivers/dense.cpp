#include "drivers/dense.hpp"

#include <algorithm>
#include <vector>

#include "kernels/kernels.hpp"
#include "drivers/threads.hpp"

namespace mdmi {

void mlp(const PackedNetwork& network, const InputRows& input, float* out, int threads) {
  constexpr int64_t kRowsPerTask = 480;  // a multiple of every target's rows at a time
  constexpr int kMostRows = 16;
  const Kernels& k = kernels();
  const PairNetwork net = network.view(network.layers().front().in, false, false);
  const int64_t width = network.layers().back().out, surplus = 2 * net.widest * k.pair_rows;
  const int64_t n_tasks = (input.rows + kRowsPerTask - 1) / kRowsPerTask;
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, n_tasks)));
  std::vector<Buffer<float>> scratch;
  for (int worker = 0; worker < workers; ++worker)
    scratch.push_back(make_buffer<float>(size_t(surplus + width * k.pair_rows)));
  parallel_for(n_tasks, workers, [&](int64_t task, int worker) {
    float* const room = scratch[size_t(worker)].get();
    const int64_t end = std::min(input.rows, (task + 1) * kRowsPerTask);
    int64_t row = task * kRowsPerTask, outer = row / input.inner, inner = row % input.inner;
    const float* x = nullptr;
    while (row < end) {
      const float* from[kMostRows];
      float* to[kMostRows];
      for (int r = 0; r < k.pair_rows; ++r) {
        if (row == end) {  // a tile is always full
          from[r] = x;
          to[r] = room + surplus + r * width;
          continue;
        }
        from[r] = x = input.x + outer * input.outer_stride + inner * input.inner_stride;
        to[r] = out + row++ * width;
        if (++inner == input.inner) inner = 0, ++outer;
      }
      k.mlp_rows(net.layers, net.n_layers, from, to, room, net.widest);
    }
  });
}

}  // namespace mdmi
