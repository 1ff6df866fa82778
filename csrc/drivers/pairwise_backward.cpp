#include "drivers/pairwise_backward.hpp"

#include <algorithm>

#include "kernels/kernels.hpp"
#include "drivers/pair_layout.hpp"
#include "drivers/threads.hpp"

namespace mdmi {
namespace {

constexpr int64_t kTapeFloats = 1 << 18;  // for each thread: about the second-level cache
constexpr int64_t kTileRows = 12;         // a multiple of every target's pair_rows
constexpr int64_t kTapeRowsPerTask = 24;
constexpr int64_t kWeightRowsPerTask = 48;  // a multiple of kTileRows
constexpr int64_t kColumnsPerTask = 64;

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

std::vector<float> copy_of(const float* x, int64_t n, bool bf16) {
  std::vector<float> copy(x, x + n);
  if (bf16)
    for (float& value : copy) value = float_from_bf16(bf16_from_float(value));
  return copy;
}

// The network with float32 operands (rounded already, where they are bfloat16) and with every matrix also transposed.
class Networks {
 public:
  explicit Networks(const NetworkWeights& network) {
    std::vector<LayerWeights> layers, transposed;
    for (const LayerWeights& layer : network.layers) {
      copies_.push_back(copy_of(layer.weight, layer.in * layer.out, network.bf16));
      layers.push_back({copies_.back().data(), layer.bias, layer.in, layer.out});
    }
    zeros_.resize(size_t(std::max<int64_t>(1, widest_input(network))), 0.0f);
    for (const LayerWeights& layer : layers) {
      std::vector<float> turned(size_t(layer.in * layer.out));
      for (int64_t i = 0; i < layer.in; ++i)
        for (int64_t o = 0; o < layer.out; ++o) turned[size_t(o * layer.in + i)] = layer.weight[i * layer.out + o];
      turned_.push_back(std::move(turned));
      transposed.push_back({turned_.back().data(), zeros_.data(), layer.out, layer.in});
    }
    forward_ = std::make_unique<PackedNetwork>(layers, network.w_out, network.last_width, network.b_out, false);
    backward_ = std::make_unique<PackedNetwork>(transposed, network.w_out, network.last_width, 0.0f, false);
    copies_.clear();
    turned_.clear();
  }

  PairNetwork forward(int64_t width, const PairRule& rule, bool bf16) const {
    PairNetwork net = forward_->view(width, rule.multiply, rule.softplus);
    net.bf16 = bf16;  // the kernel of the tape rounds z itself
    return net;
  }
  const DenseLayer* transposed() const { return backward_->view(1, false, false).layers; }

 private:
  static int64_t widest_input(const NetworkWeights& network) {
    int64_t widest = 0;
    for (const LayerWeights& layer : network.layers) widest = std::max(widest, layer.in);
    return widest;
  }

  std::vector<std::vector<float>> copies_, turned_;
  std::vector<float> zeros_;
  std::unique_ptr<PackedNetwork> forward_, backward_;
};

// Sums of the gradients, in rows filled up like those of the tape.
struct Sums {
  std::vector<Buffer<float>> weights, biases;
  Buffer<float> w_out;
  double b_out = 0.0;
  std::vector<double> shift;
};

Buffer<float> zeros(int64_t n) {
  Buffer<float> buffer = make_buffer<float>(size_t(n));
  std::fill_n(buffer.get(), n, 0.0f);
  return buffer;
}

class Backward {
 public:
  Backward(const PairNetwork& net, const DenseLayer* transposed, const Gathered& gathered, const PairRule& rule,
           int threads)
      : kernels_(kernels()), net_(net), transposed_(transposed), gathered_(gathered), rule_(rule), threads_(threads) {
    strides_.push_back(padded(net.width));
    for (int64_t k = 0; k < net.n_layers; ++k) strides_.push_back(padded(net.layers[k].out));
    int64_t floats = 0;
    for (int64_t stride : strides_) floats += 2 * stride;
    capacity_ =
        std::max<int64_t>(kTapeRowsPerTask, kTapeFloats * threads / floats) / kTapeRowsPerTask * kTapeRowsPerTask;
    for (int64_t stride : strides_) {
      z_storage_.push_back(zeros(capacity_ * stride + kPadding));  // add_products may read past the last row
      d_storage_.push_back(make_buffer<float>(size_t(capacity_ * stride)));
      z_.push_back(z_storage_.back().get());
      d_.push_back(d_storage_.back().get());
    }
    const int64_t halves = int64_t(gathered.position.size()) * gathered.stride;
    du_ = zeros(halves);
    dv_ = zeros(halves);
    for (int64_t k = 0; k < net.n_layers; ++k) {
      sums_.weights.push_back(zeros(padded(net.layers[k].in) * strides_[size_t(k) + 1]));
      sums_.biases.push_back(zeros(strides_[size_t(k) + 1]));
    }
    sums_.w_out = zeros(strides_.back());
    sums_.shift.resize(size_t(gathered.shift.values == nullptr ? 0 : gathered.shift.count), 0.0);
  }

  void add(int64_t i, int64_t j, float grad) {
    left_.push_back(gathered_.u_of(i));
    right_.push_back(gathered_.v_of(j));
    d_left_.push_back(du_.get() + i * gathered_.stride);
    d_right_.push_back(dv_.get() + j * gathered_.stride);
    grad_.push_back(grad);
    if (!sums_.shift.empty()) {
      relation_.push_back(gathered_.relation_of(i, j));
      shift_.push_back(gathered_.shift.values[relation_.back()]);
    }
    if (int64_t(grad_.size()) == capacity_) flush();
  }

  void flush() {
    if (grad_.empty()) return;
    const int64_t n = int64_t(grad_.size());
    while (int64_t(grad_.size()) % kTileRows != 0) {  // whole tiles: pairs that weigh nothing
      left_.push_back(left_[0]);
      right_.push_back(right_[0]);
      grad_.push_back(0.0f);
      shift_.push_back(0.0f);
    }
    fill_tape();
    add_sums(n);
    left_.clear(), right_.clear(), d_left_.clear(), d_right_.clear(), grad_.clear();
    relation_.clear(), shift_.clear();
  }

  void write(const Halves& halves, bool same_gradient, const PairGradients& out) const;

 private:
  PairTape tape() {
    return {z_.data(), d_.data(), strides_.data(), grad_.data(), sums_.shift.empty() ? nullptr : shift_.data()};
  }

  void fill_tape() {
    const int64_t n = int64_t(grad_.size());
    const PairTape tape = this->tape();
    parallel_for(pieces(n, kTapeRowsPerTask), threads_, [&](int64_t task, int) {
      const int64_t end = std::min(n, (task + 1) * kTapeRowsPerTask);
      for (int64_t at = task * kTapeRowsPerTask; at < end; at += kernels_.pair_rows)
        kernels_.tape_pairs(net_, transposed_, left_.data() + at, right_.data() + at, tape, at);
    });
  }

  // Each task owns some elements of the sums and runs through all pairs in order.
  void add_sums(int64_t n) {
    struct Task {
      int64_t layer, begin, end;  // rows of a layer's weights, or columns of the halves where layer is -1
    };
    std::vector<Task> tasks;
    for (int64_t k = 0; k < net_.n_layers; ++k)
      for (int64_t h = 0; h < net_.layers[k].in; h += kWeightRowsPerTask)
        tasks.push_back({k, h, std::min(net_.layers[k].in, h + kWeightRowsPerTask)});
    for (int64_t h = 0; h < strides_[0]; h += kColumnsPerTask)
      tasks.push_back({-1, h, std::min(strides_[0], h + kColumnsPerTask)});
    const PairTape tape = this->tape();
    parallel_for(int64_t(tasks.size()), threads_, [&](int64_t index, int) {
      const Task& task = tasks[size_t(index)];
      if (task.layer < 0) {
        kernels_.add_to_halves(tape, left_.data(), right_.data(), d_left_.data(), d_right_.data(), n, net_.multiply,
                               task.begin, task.end);
        return;
      }
      const size_t k = size_t(task.layer);
      kernels_.add_products(z_[k], strides_[k], d_[k + 1], strides_[k + 1], n, task.begin, task.end,
                            sums_.weights[k].get());
      if (task.begin == 0) kernels_.add_rows(d_[k + 1], strides_[k + 1], nullptr, n, sums_.biases[k].get());
    });
    kernels_.add_rows(z_.back(), strides_.back(), grad_.data(), n, sums_.w_out.get());
    for (int64_t pair = 0; pair < n; ++pair) sums_.b_out += double(grad_[size_t(pair)]);
    for (size_t pair = 0; pair < relation_.size(); ++pair) sums_.shift[size_t(relation_[pair])] += double(grad_[pair]);
  }

  const Kernels& kernels_;
  const PairNetwork net_;
  const DenseLayer* transposed_;
  const Gathered& gathered_;
  const PairRule rule_;
  int threads_;
  int64_t capacity_;
  std::vector<int64_t> strides_;
  std::vector<Buffer<float>> z_storage_, d_storage_;
  std::vector<float*> z_, d_;
  Buffer<float> du_, dv_;
  Sums sums_;
  std::vector<const float*> left_, right_;
  std::vector<float*> d_left_, d_right_;
  std::vector<float> grad_, shift_;
  std::vector<int64_t> relation_;
};

void Backward::write(const Halves& halves, bool same_gradient, const PairGradients& out) const {
  std::fill_n(out.u, halves.batch * halves.n * halves.width, 0.0f);
  std::fill_n(out.v, halves.batch * halves.n * halves.width, 0.0f);
  for (int64_t b = 0; b < halves.batch; ++b)
    for (int64_t row = gathered_.first[size_t(b)]; row < gathered_.first[size_t(b) + 1]; ++row) {
      const int64_t to = (b * halves.n + gathered_.position[size_t(row)]) * halves.width;
      const float *du = du_.get() + row * gathered_.stride, *dv = dv_.get() + row * gathered_.stride;
      for (int64_t h = 0; h < halves.width; ++h) {
        out.u[to + h] = same_gradient ? 0.5f * (du[h] + dv[h]) : du[h];
        out.v[to + h] = same_gradient ? 0.5f * (du[h] + dv[h]) : dv[h];
      }
    }
  for (size_t k = 0; k < out.weights.size(); ++k) {
    const DenseLayer& layer = net_.layers[k];
    for (int64_t h = 0; h < layer.in; ++h)
      std::copy_n(sums_.weights[k].get() + h * strides_[k + 1], layer.out, out.weights[k] + h * layer.out);
    std::copy_n(sums_.biases[k].get(), layer.out, out.biases[k]);
  }
  std::copy_n(sums_.w_out.get(), net_.n_layers == 0 ? net_.width : net_.layers[net_.n_layers - 1].out, out.w_out);
  *out.b_out = float(sums_.b_out);
  for (size_t r = 0; r < sums_.shift.size(); ++r) out.shift[r] = float(sums_.shift[r]);
}

void backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, const Gathered& gathered,
              const PairLayout& layout, const float* grad, const PairGradients& out, int threads) {
  const Networks networks(network);
  Backward sums(networks.forward(halves.width, rule, network.bf16), networks.transposed(), gathered, rule, threads);
  // Where f_ij = f_ji by themselves: one evaluation serves both, and its gradient goes to u and v in equal parts.
  const bool mean = rule.symmetry == Symmetry::mean, once = mean && halves.symmetric();
  layout.for_pairs(0, layout.n_pairs(), [&](const PairRow& row, int64_t j) {
    const int64_t position = gathered.position[size_t(j)];
    float g = grad[row.at + row.step * position];
    if (row.mirrored) g += grad[row.mirror_at + row.mirror_step * position];
    if (rule.symmetry == Symmetry::upper && j < row.i) {
      sums.add(j, row.i, g);
    } else if (mean && !once) {
      sums.add(row.i, j, 0.5f * g);
      sums.add(j, row.i, 0.5f * g);
    } else {
      sums.add(row.i, j, g);
    }
  });
  sums.flush();
  sums.write(halves, once, out);
}

}  // namespace

void score_all_backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, const float* grad,
                        const PairGradients& out, int threads) {
  const Gathered gathered = gather(halves);
  backward(network, halves, rule, gathered, full_layout(gathered, halves.n, rule.symmetry != Symmetry::none), grad, out,
           threads);
}

void score_rows_backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, const int64_t* rows,
                         int64_t n_rows, const float* grad, const PairGradients& out, int threads) {
  const Gathered gathered = gather(halves);
  backward(network, halves, rule, gathered, rows_layout(gathered, halves.n, rows, n_rows), grad, out, threads);
}

void score_band_backward(const NetworkWeights& network, const Halves& halves, const PairRule& rule, int64_t window,
                         const float* grad, const PairGradients& out, int threads) {
  const Gathered gathered = gather(halves);
  backward(network, halves, rule, gathered, band_layout(gathered, halves.n, window, rule.symmetry != Symmetry::none),
           grad, out, threads);
}

}  // namespace mdmi
