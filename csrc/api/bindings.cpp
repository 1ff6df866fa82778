// The only file that knows Python. Tensors arrive as addresses and strides: mdmi_fast/native keeps them alive during a
// call and has checked their shapes, what an address must be is checked here. No Python object is touched while the GIL
// is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "drivers/checks.hpp"
#include "drivers/dense.hpp"
#include "drivers/pairwise.hpp"
#include "drivers/pairwise_backward.hpp"
#include "drivers/score_and_select.hpp"
#include "drivers/select.hpp"
#include "drivers/stats.hpp"
#include "drivers/threads.hpp"
#include "kernels/kernels.hpp"
#include "tasks/sudoku.hpp"

namespace py = pybind11;
using mdmi::Dtype;
using mdmi::Sizes;
using mdmi::usable_threads;

namespace {

template <class T>
T* at(const char* op, const char* name, uintptr_t address, Sizes sizes) {
  return mdmi::array(op, name, reinterpret_cast<T*>(address), sizes);
}

template <class T>
T* at_or_null(const char* op, const char* name, uintptr_t address, Sizes sizes) {
  return mdmi::array_or_null(op, name, reinterpret_cast<T*>(address), sizes);
}

// A tensor of this dtype, whatever its strides.
void* tensor_at(const char* op, const char* name, uintptr_t address, int dtype, Sizes sizes) {
  return mdmi::array(op, name, reinterpret_cast<void*>(address), sizes, uintptr_t(mdmi::item_size(Dtype(dtype))));
}

using Shape2 = std::tuple<int64_t, int64_t>;
using Strides2 = std::tuple<int64_t, int64_t>;
using Strides3 = std::tuple<int64_t, int64_t, int64_t>;
using TensorIn = std::tuple<uintptr_t, int, Strides2>;  // address, dtype code, strides
using MatrixIn = std::tuple<uintptr_t, int, Strides3>;  // the same
using MaskIn = std::tuple<uintptr_t, Strides2>;         // address 0: every position is masked

const TensorIn no_entropy = {0, 0, {0, 0}};  // for color

mdmi::Positions positions(const char* op, Shape2 shape, const TensorIn& entropy, const MaskIn& mask) {
  const auto [batch, n] = shape;
  mdmi::require_positions(op, n);
  const auto& [data, dtype, strides] = entropy;
  const auto& [mask_data, mask_strides] = mask;
  return {batch,
          n,
          &entropy == &no_entropy ? nullptr : tensor_at(op, "entropy", data, dtype, {batch, n}),
          Dtype(dtype),
          std::get<0>(strides),
          std::get<1>(strides),
          at_or_null<uint8_t>(op, "mask", mask_data, {batch, n}),
          std::get<0>(mask_strides),
          std::get<1>(mask_strides)};
}

mdmi::MiMatrix matrix(const char* op, int64_t batch, int64_t n, int64_t columns, const MatrixIn& mi) {
  const auto& [data, dtype, strides] = mi;
  return {tensor_at(op, "mi", data, dtype, {batch, n, columns}), Dtype(dtype), std::get<0>(strides),
          std::get<1>(strides), std::get<2>(strides)};
}

int64_t band_width(const char* op, int64_t window) {
  if (window < 0 || window > INT64_MAX / 4) mdmi::refuse(op, "window is out of range, got " + std::to_string(window));
  return 2 * window + 1;
}

// A tensor of rows: address, dtype code, (inner, outer stride, inner stride).
using RowsIn = std::tuple<uintptr_t, int, Strides3>;
// The same with (count, stride between alternatives, rows of one) and the address of the weights.
using StackIn = std::tuple<RowsIn, Strides3, uintptr_t>;
using Out = std::tuple<uintptr_t, int>;

mdmi::Rows rows(const char* op, const char* name, const RowsIn& in, Sizes sizes) {
  const auto& [data, dtype, layout] = in;
  return {tensor_at(op, name, data, dtype, sizes), Dtype(dtype), std::get<0>(layout), std::get<1>(layout),
          std::get<2>(layout)};
}

mdmi::Stack stack(const char* op, const StackIn& in, int64_t width) {
  const auto& [first, layout, weights] = in;
  const auto [count, stride_k, n_rows] = layout;
  return {rows(op, "logits", first, {count, n_rows, width}), count, stride_k, n_rows,
          at_or_null<double>(op, "weights", weights, {count, n_rows})};
}

mdmi::RowsOut rows_out(const char* op, const char* name, Out out, Sizes sizes) {
  return {tensor_at(op, name, std::get<0>(out), std::get<1>(out), sizes), Dtype(std::get<1>(out))};
}

mdmi::StatsOut stats_out(const char* op, const std::array<uintptr_t, 5>& out, int64_t n_rows) {
  mdmi::StatsOut to;
  to.entropy = at_or_null<float>(op, "entropy", out[0], {n_rows});
  to.logsumexp = at_or_null<float>(op, "logsumexp", out[1], {n_rows});
  to.confidence = at_or_null<float>(op, "confidence", out[2], {n_rows});
  to.token = at_or_null<int64_t>(op, "token", out[3], {n_rows});
  to.margin = at_or_null<float>(op, "margin", out[4], {n_rows});
  return to;
}

mdmi::RowState* states_at(uintptr_t states, int64_t n_rows) {
  mdmi::count_of("linear_token_stats", "states", {n_rows, int64_t(sizeof(mdmi::RowState))});
  return mdmi::array("linear_token_stats", "states", reinterpret_cast<mdmi::RowState*>(states), {n_rows},
                     alignof(mdmi::RowState));
}

// values and how many (0: none), relation (0: by distance) and its stride from sequence to sequence.
using ShiftIn = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t>;
// u, v, then (batch, n, width), the mask, and what is added to scores.
using HalvesIn = std::tuple<TensorIn, TensorIn, std::tuple<int64_t, int64_t, int64_t>, uintptr_t, Strides2, ShiftIn>;
using RuleIn = std::tuple<int, bool, bool>;  // symmetry, multiply, softplus

mdmi::PairShift pair_shift(const char* op, const ShiftIn& in, int64_t batch, int64_t n) {
  const auto [values, count, relation, stride_b] = in;
  if (count == 0) return {};
  const int32_t* of_pairs = at_or_null<int32_t>(op, "relation", relation, {stride_b == 0 ? 1 : batch, n, n});
  return {at<float>(op, "shift", values, {count}), count, of_pairs, stride_b};
}

mdmi::Halves halves(const char* op, const HalvesIn& in) {
  const auto& [u, v, shape, mask, mask_strides, shift] = in;
  const auto& [u_data, u_dtype, u_strides] = u;
  const auto& [v_data, v_dtype, v_strides] = v;
  const auto [batch, n, width] = shape;
  mdmi::require_positions(op, n);
  return {tensor_at(op, "u", u_data, u_dtype, {batch, n, width}),
          tensor_at(op, "v", v_data, v_dtype, {batch, n, width}),
          Dtype(u_dtype),
          Dtype(v_dtype),
          std::get<0>(u_strides),
          std::get<1>(u_strides),
          std::get<0>(v_strides),
          std::get<1>(v_strides),
          batch,
          n,
          width,
          at_or_null<uint8_t>(op, "mask", mask, {batch, n}),
          std::get<0>(mask_strides),
          std::get<1>(mask_strides),
          pair_shift(op, shift, batch, n)};
}

mdmi::PairRule pair_rule(const RuleIn& in) {
  return {mdmi::Symmetry(std::get<0>(in)), std::get<1>(in), std::get<2>(in)};
}

// Layers as (weight, bias, in, out), then w_out, its width, b_out, whether operands are bfloat16.
using WeightsIn =
    std::tuple<std::vector<std::tuple<uintptr_t, uintptr_t, int64_t, int64_t>>, uintptr_t, int64_t, float, bool>;
using GradientsOut =
    std::tuple<uintptr_t, uintptr_t, std::vector<uintptr_t>, std::vector<uintptr_t>, uintptr_t, uintptr_t, uintptr_t>;

mdmi::NetworkWeights network_weights(const char* op, const WeightsIn& in) {
  const auto& [layers, w_out, last_width, b_out, bf16] = in;
  mdmi::NetworkWeights weights{{}, at<float>(op, "w_out", w_out, {last_width}), last_width, b_out, bf16};
  for (const auto& [weight, bias, rows, columns] : layers)
    weights.layers.push_back(
        {at<float>(op, "weights", weight, {rows, columns}), at<float>(op, "biases", bias, {columns}), rows, columns});
  return weights;
}

mdmi::PairGradients gradients(const char* op, const GradientsOut& out, const mdmi::NetworkWeights& network,
                              const mdmi::Halves& halves) {
  const auto& [u, v, weights, biases, w_out, b_out, shift] = out;
  const Sizes sizes = {halves.batch, halves.n, halves.width};
  mdmi::PairGradients to{at<float>(op, "the gradient of u", u, sizes),
                         at<float>(op, "the gradient of v", v, sizes),
                         {},
                         {},
                         at<float>(op, "the gradient of w_out", w_out, {network.last_width}),
                         at<float>(op, "the gradient of b_out", b_out, {1}),
                         at_or_null<float>(op, "the gradient of shift", shift, {halves.shift.count})};
  for (size_t k = 0; k < network.layers.size(); ++k) {
    const mdmi::LayerWeights& layer = network.layers[k];
    to.weights.push_back(at<float>(op, "the gradient of weights", weights.at(k), {layer.in, layer.out}));
    to.biases.push_back(at<float>(op, "the gradient of biases", biases.at(k), {layer.out}));
  }
  return to;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CPU kernels of mdmi_fast. Private: call mdmi_fast.ops.";
  m.def("isa", [] { return std::string(mdmi::kernels().isa); });
  m.def("supported_isas", &mdmi::supported_isas);
  m.def("fma_burst", [](int64_t rounds) {
    py::gil_scoped_release unlocked;
    return mdmi::kernels().fma_burst(rounds);
  });
  m.attr("no_window") = mdmi::kNoWindow;
  m.def("select_budget", [](const std::string& name, Shape2 shape, uintptr_t entropy, int entropy_dtype,
                            Strides2 entropy_strides, uintptr_t mask, Strides2 mask_strides, uintptr_t mi, int mi_dtype,
                            Strides3 mi_strides, int64_t window, uintptr_t gamma, double lam, double entropy_weight,
                            bool cheapest, int64_t limit, uintptr_t selected, uintptr_t spent, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = name.c_str();
    const auto [batch, n] = shape;
    mdmi::MiMatrix pairs =
        matrix(op, batch, n, window == mdmi::kNoWindow ? n : band_width(op, window), {mi, mi_dtype, mi_strides});
    pairs.window = window;
    mdmi::select_budget(op, positions(op, shape, {entropy, entropy_dtype, entropy_strides}, {mask, mask_strides}),
                        pairs, {at<double>(op, "gamma", gamma, {batch}), lam, entropy_weight, cheapest, limit},
                        at<uint8_t>(op, "selected", selected, {batch, n}), at<double>(op, "spent", spent, {batch}),
                        usable_threads(threads));
  });
  m.def("select_threshold", [](Shape2 shape, uintptr_t entropy, int entropy_dtype, Strides2 entropy_strides,
                               uintptr_t mask, Strides2 mask_strides, uintptr_t mi, int mi_dtype, Strides3 mi_strides,
                               double tau, int64_t limit, uintptr_t selected, uintptr_t spent, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "select_threshold";
    const auto [batch, n] = shape;
    mdmi::select_threshold(positions(op, shape, {entropy, entropy_dtype, entropy_strides}, {mask, mask_strides}),
                           matrix(op, batch, n, n, {mi, mi_dtype, mi_strides}), tau, limit,
                           at<uint8_t>(op, "selected", selected, {batch, n}), at<double>(op, "spent", spent, {batch}),
                           usable_threads(threads));
  });
  m.def("color", [](Shape2 shape, uintptr_t mask, Strides2 mask_strides, uintptr_t mi, int mi_dtype,
                    Strides3 mi_strides, double tau, uintptr_t group, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "color";
    const auto [batch, n] = shape;
    mdmi::color(positions(op, shape, no_entropy, {mask, mask_strides}),
                matrix(op, batch, n, n, {mi, mi_dtype, mi_strides}), tau, at<int64_t>(op, "group", group, {batch, n}),
                usable_threads(threads));
  });
  m.def("mlp", [](const mdmi::PackedNetwork& network, uintptr_t x, int64_t rows, int64_t inner, int64_t outer_stride,
                  int64_t inner_stride, uintptr_t out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const auto& layers = network.layers();
    mdmi::mlp(network, {at<float>("mlp", "x", x, {rows, layers.front().in}), rows, inner, outer_stride, inner_stride},
              at<float>("mlp", "the result", out, {rows, layers.back().out}), usable_threads(threads));
  });
  m.attr("sudoku_weights") = mdmi::sudoku::kWeights;
  m.attr("sudoku_hidden") = mdmi::sudoku::kHidden;
  m.attr("sudoku_codes") = mdmi::sudoku::kCodes;
  m.def("sudoku_forward", [](uintptr_t tokens, int64_t boards, uintptr_t weights, int iterations, uintptr_t codes,
                             uintptr_t logits, uintptr_t hidden, int64_t threads) {
    py::gil_scoped_release unlocked;
    using namespace mdmi::sudoku;
    const char* op = "sudoku_forward";
    mdmi::sudoku_forward(at<int64_t>(op, "tokens", tokens, {boards, kCells}), boards,
                         at<float>(op, "weights", weights, {kWeights}), iterations,
                         at<float>(op, "codes", codes, {kCells, kCodes}),
                         at<float>(op, "logits", logits, {boards, kCells, kDigits + 1}),
                         at<float>(op, "hidden", hidden, {boards, kCells, kHidden}), usable_threads(threads));
  });

  m.attr("ROW_STATE_BYTES") = sizeof(mdmi::RowState);
  m.def("row_stats", [](RowsIn logits, int64_t n_rows, int64_t width, std::array<uintptr_t, 5> out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "row_stats";
    mdmi::row_stats(rows(op, "logits", logits, {n_rows, width}), n_rows, width, stats_out(op, out, n_rows),
                    usable_threads(threads));
  });
  m.def("stats_backward", [](RowsIn logits, int64_t n_rows, int64_t width, std::array<uintptr_t, 4> grad, Out d_logits,
                             int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "stats_backward";
    const auto incoming = [&](int k) { return at_or_null<double>(op, "a gradient", grad[size_t(k)], {n_rows}); };
    mdmi::stats_backward(rows(op, "logits", logits, {n_rows, width}), n_rows, width,
                         {incoming(0), incoming(1), incoming(2), incoming(3)},
                         rows_out(op, "the gradient of logits", d_logits, {n_rows, width}), usable_threads(threads));
  });
  m.def("new_states",
        [](uintptr_t states, int64_t n_rows) { std::fill_n(states_at(states, n_rows), n_rows, mdmi::RowState()); });
  m.def("absorb_tile",
        [](RowsIn tile, int64_t n_rows, int64_t width, int64_t first_token, uintptr_t states, int64_t threads) {
          py::gil_scoped_release unlocked;
          mdmi::absorb_tile(rows("linear_token_stats", "a tile", tile, {n_rows, width}), n_rows, width, first_token,
                            states_at(states, n_rows), usable_threads(threads));
        });
  m.def("finish_rows", [](uintptr_t states, int64_t n_rows, std::array<uintptr_t, 5> out) {
    py::gil_scoped_release unlocked;
    mdmi::finish_rows(states_at(states, n_rows), n_rows, stats_out("linear_token_stats", out, n_rows));
  });
  m.def("stack_stats", [](StackIn logits, RowsIn base, int64_t width, std::array<uintptr_t, 3> out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "stack_stats";
    const int64_t n_rows = std::get<2>(std::get<1>(logits));
    const mdmi::StackOut to = {at_or_null<float>(op, "the mixture's entropy", out[0], {n_rows}),
                               at_or_null<float>(op, "the expected entropy", out[1], {n_rows}),
                               at_or_null<float>(op, "the expected KL", out[2], {n_rows})};
    const mdmi::Rows base_rows = to.kl == nullptr ? mdmi::Rows{} : rows(op, "base_logits", base, {n_rows, width});
    mdmi::stack_stats(stack(op, logits, width), to.kl == nullptr ? nullptr : &base_rows, width, to,
                      usable_threads(threads));
  });
  m.def("expected_kl_backward",
        [](StackIn logits, RowsIn base, int64_t width, uintptr_t grad, Out d_logits, Out d_base, int64_t threads) {
          py::gil_scoped_release unlocked;
          const char* op = "expected_kl_backward";
          const auto [count, stride_k, n_rows] = std::get<1>(logits);
          mdmi::expected_kl_backward(stack(op, logits, width), rows(op, "base_logits", base, {n_rows, width}), width,
                                     at<double>(op, "the gradient", grad, {n_rows}),
                                     rows_out(op, "the gradient of logits", d_logits, {count, n_rows, width}),
                                     rows_out(op, "the gradient of base_logits", d_base, {n_rows, width}),
                                     usable_threads(threads));
        });
  m.def("mixture_entropy_backward", [](StackIn logits, int64_t width, uintptr_t grad, Out d_logits, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "mixture_entropy_backward";
    const auto [count, stride_k, n_rows] = std::get<1>(logits);
    mdmi::mixture_entropy_backward(stack(op, logits, width), width, at<double>(op, "the gradient", grad, {n_rows}),
                                   rows_out(op, "the gradient of logits", d_logits, {count, n_rows, width}),
                                   usable_threads(threads));
  });

  py::class_<mdmi::PackedNetwork>(m, "PackedNetwork").def(py::init([](const WeightsIn& in) {
    const mdmi::NetworkWeights weights = network_weights("PackedNetwork", in);
    return std::make_unique<mdmi::PackedNetwork>(weights.layers, weights.w_out, weights.last_width, weights.b_out,
                                                 weights.bf16);
  }));
  m.def("score_all",
        [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, uintptr_t out, int64_t threads) {
          py::gil_scoped_release unlocked;
          const char* op = "pairwise_mlp";
          const mdmi::Halves pairs = halves(op, in);
          mdmi::score_all(network, pairs, pair_rule(rule),
                          at<float>(op, "the result", out, {pairs.batch, pairs.n, pairs.n}), usable_threads(threads));
        });
  m.def("score_rows", [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, uintptr_t rows,
                         int64_t n_rows, uintptr_t out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "pairwise_mlp_rows";
    const mdmi::Halves pairs = halves(op, in);
    mdmi::score_rows(network, pairs, pair_rule(rule), at<int64_t>(op, "rows", rows, {pairs.batch, n_rows}), n_rows,
                     at<float>(op, "the result", out, {pairs.batch, n_rows, pairs.n}), usable_threads(threads));
  });
  m.def("score_band", [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, int64_t window,
                         uintptr_t out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "pairwise_mlp_band";
    const mdmi::Halves pairs = halves(op, in);
    mdmi::score_band(network, pairs, pair_rule(rule), window,
                     at<float>(op, "the result", out, {pairs.batch, pairs.n, band_width(op, window)}),
                     usable_threads(threads));
  });
  m.def("score_and_select",
        [](const mdmi::PackedNetwork& network, const HalvesIn& in, const RuleIn& rule, uintptr_t entropy,
           int entropy_dtype, Strides2 entropy_strides, uintptr_t gamma, double lam, double entropy_weight,
           int64_t limit, uintptr_t selected, uintptr_t spent, int64_t threads) {
          py::gil_scoped_release unlocked;
          const char* op = "score_and_select";
          const mdmi::Halves pairs = halves(op, in);
          const auto& [u, v, shape, mask, mask_strides, shift] = in;
          const auto [batch, n, width] = shape;
          return mdmi::score_and_select(
              network, pairs, pair_rule(rule),
              positions(op, {batch, n}, {entropy, entropy_dtype, entropy_strides}, {mask, mask_strides}),
              {at<double>(op, "gamma", gamma, {batch}), lam, entropy_weight, false, limit},
              at<uint8_t>(op, "selected", selected, {batch, n}), at<double>(op, "spent", spent, {batch}),
              usable_threads(threads));
        });
  m.def("score_all_backward", [](const WeightsIn& weights, const HalvesIn& in, const RuleIn& rule, uintptr_t grad,
                                 const GradientsOut& out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "pairwise_mlp_backward";
    const mdmi::Halves pairs = halves(op, in);
    const mdmi::NetworkWeights network = network_weights(op, weights);
    mdmi::score_all_backward(network, pairs, pair_rule(rule),
                             at<float>(op, "the gradient", grad, {pairs.batch, pairs.n, pairs.n}),
                             gradients(op, out, network, pairs), usable_threads(threads));
  });
  m.def("score_rows_backward", [](const WeightsIn& weights, const HalvesIn& in, const RuleIn& rule, uintptr_t rows,
                                  int64_t n_rows, uintptr_t grad, const GradientsOut& out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "pairwise_mlp_rows_backward";
    const mdmi::Halves pairs = halves(op, in);
    const mdmi::NetworkWeights network = network_weights(op, weights);
    mdmi::score_rows_backward(network, pairs, pair_rule(rule), at<int64_t>(op, "rows", rows, {pairs.batch, n_rows}),
                              n_rows, at<float>(op, "the gradient", grad, {pairs.batch, n_rows, pairs.n}),
                              gradients(op, out, network, pairs), usable_threads(threads));
  });
  m.def("score_band_backward", [](const WeightsIn& weights, const HalvesIn& in, const RuleIn& rule, int64_t window,
                                  uintptr_t grad, const GradientsOut& out, int64_t threads) {
    py::gil_scoped_release unlocked;
    const char* op = "pairwise_mlp_band_backward";
    const mdmi::Halves pairs = halves(op, in);
    const mdmi::NetworkWeights network = network_weights(op, weights);
    mdmi::score_band_backward(network, pairs, pair_rule(rule), window,
                              at<float>(op, "the gradient", grad, {pairs.batch, pairs.n, band_width(op, window)}),
                              gradients(op, out, network, pairs), usable_threads(threads));
  });
}
