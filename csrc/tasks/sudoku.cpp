#include "tasks/sudoku.hpp"

#include <memory>
#include <vector>

#include "kernels/kernels.hpp"
#include "drivers/threads.hpp"

namespace mdmi {
namespace {

using namespace sudoku;

Layout make_layout() {
  Layout layout;
  for (int vector = 0; vector < kVectors; ++vector) {
    const int cell = vector / kDigits, digit = vector % kDigits, row = cell / 9, column = cell % 9;
    const auto unit = [&](int index) { return uint16_t((index * kDigits + digit) * kWidth); };
    layout.row[vector] = unit(row);
    layout.column[vector] = unit(9 + column);
    layout.box[vector] = unit(18 + 3 * (row / 3) + column / 3);
    layout.cell[vector] = uint16_t(kUnits * kDigits * kWidth + cell * kWidth);
  }
  return layout;
}

}  // namespace

void sudoku_forward(const int64_t* tokens, int64_t boards, const float* weights, int iterations, const float* codes,
                    float* logits, float* hidden, int threads) {
  static const Layout layout = make_layout();
  const auto forward = kernels().sudoku_forward;
  std::vector<std::unique_ptr<Scratch>> scratch(threads < 1 ? 1 : threads);
  parallel_for(boards, threads, [&](int64_t board, int worker) {
    if (!scratch[worker]) scratch[worker] = std::make_unique<Scratch>();
    forward(layout, *scratch[worker], tokens + board * kCells, weights, iterations, codes,
            logits + board * kCells * (kDigits + 1), hidden + board * kCells * kHidden);
  });
}

}  // namespace mdmi
