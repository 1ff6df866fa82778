#include "drivers/pairwise.hpp"

#include <algorithm>

#include "kernels/kernels.hpp"
#include "drivers/pair_layout.hpp"
#include "drivers/pair_scorer.hpp"
#include "drivers/threads.hpp"

namespace mdmi {
namespace {

const float* put_padded(const float* x, int64_t n, float*& to) {
  float* begin = to;
  std::copy(x, x + n, begin);
  std::fill(begin + n, begin + padded(n), 0.0f);
  to += padded(n);
  return begin;
}

}  // namespace

PackedNetwork::PackedNetwork(const std::vector<LayerWeights>& layers, const float* w_out, int64_t last_width,
                             float b_out, bool bf16)
    : b_out_(b_out), bf16_(bf16) {
  const Kernels& k = kernels();
  int64_t floats = padded(last_width);
  for (const LayerWeights& layer : layers)
    if (__builtin_add_overflow(floats, padded(layer.out) * (1 + k.slots_of(layer.in, bf16)), &floats))
      throw std::bad_array_new_length();
  storage_ = make_buffer<float>(size_t(floats));
  float* to = storage_.get();
  w_out_ = put_padded(w_out, last_width, to);
  for (const LayerWeights& layer : layers) {
    const float* bias = put_padded(layer.bias, layer.out, to);
    k.pack_layer(layer.weight, layer.in, layer.out, bf16, to);
    layers_.push_back({layer.in, layer.out, to, bias});
    to += padded(layer.out) * k.slots_of(layer.in, bf16);
  }
}

PairNetwork PackedNetwork::view(int64_t width, bool multiply, bool softplus) const {
  int64_t widest = padded(width);
  for (const DenseLayer& layer : layers_) widest = std::max(widest, padded(layer.out));
  return {width, multiply, softplus, bf16_, int64_t(layers_.size()), layers_.data(), w_out_, b_out_, widest};
}

namespace {

// Some ten microseconds of work or more, in whole tiles.
int64_t pairs_per_task(const PairNetwork& net) {
  const int64_t pairs = std::min<int64_t>(4096, std::max<int64_t>(24, (int64_t(1) << 19) / net.operations()));
  return pairs / 24 * 24;
}

void score_layout(const PairNetwork& net, const Gathered& gathered, const PairLayout& layout, const PairRule& rule,
                  bool symmetric, float* out, int threads) {
  const int64_t step = pairs_per_task(net), n_pairs = layout.n_pairs(), n_tasks = (n_pairs + step - 1) / step;
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, n_tasks)));
  std::vector<PairScorer> scorers;
  for (int worker = 0; worker < workers; ++worker) scorers.emplace_back(net, gathered, rule, symmetric);
  parallel_for(n_tasks, workers, [&](int64_t task, int worker) {
    PairScorer& scorer = scorers[size_t(worker)];
    layout.for_pairs(task * step, std::min(n_pairs, (task + 1) * step), [&](const PairRow& row, int64_t j) {
      const int64_t position = gathered.position[size_t(j)];
      float* const mirror = row.mirrored ? out + row.mirror_at + row.mirror_step * position : nullptr;
      scorer.add(row.i, j, out + row.at + row.step * position, mirror);
    });
    scorer.flush();
  });
}

}  // namespace

void score_all(const PackedNetwork& network, const Halves& halves, const PairRule& rule, float* out, int threads) {
  std::fill_n(out, halves.batch * halves.n * halves.n, 0.0f);
  const Gathered gathered = gather(halves);
  const bool symmetric = rule.symmetry != Symmetry::none || halves.symmetric();
  score_layout(network.view(halves.width, rule.multiply, rule.softplus), gathered,
               full_layout(gathered, halves.n, symmetric), rule, halves.symmetric(), out, threads);
}

void score_rows(const PackedNetwork& network, const Halves& halves, const PairRule& rule, const int64_t* rows,
                int64_t n_rows, float* out, int threads) {
  std::fill_n(out, halves.batch * n_rows * halves.n, 0.0f);
  const Gathered gathered = gather(halves);
  score_layout(network.view(halves.width, rule.multiply, rule.softplus), gathered,
               rows_layout(gathered, halves.n, rows, n_rows), rule, halves.symmetric(), out, threads);
}

void score_band(const PackedNetwork& network, const Halves& halves, const PairRule& rule, int64_t window, float* out,
                int threads) {
  std::fill_n(out, halves.batch * halves.n * (2 * window + 1), 0.0f);
  const Gathered gathered = gather(halves);
  const bool symmetric = rule.symmetry != Symmetry::none || halves.symmetric();
  score_layout(network.view(halves.width, rule.multiply, rule.softplus), gathered,
               band_layout(gathered, halves.n, window, symmetric), rule, halves.symmetric(), out, threads);
}

}  // namespace mdmi
