#include "tasks/sudoku.hpp"

#include <memory>
#include <stdexcept>
#include <string>
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

const Table* const tables[] = {
    &table_scalar,
#if defined(__x86_64__)
    &table_avx2,
    &table_avx512,
    &table_avx512bf16,
#elif defined(__aarch64__)
    &table_neon,
#endif
};

// Of the instruction set that the kernels in use are of.
const Table& table() {
  for (const Table* candidate : tables)
    if (std::string(candidate->isa) == kernels().isa) return *candidate;
  throw std::runtime_error(std::string("sudoku_forward: has no kernel for ") + kernels().isa);
}

}  // namespace

void sudoku_forward(const int64_t* tokens, int64_t boards, const float* weights, int iterations, const float* codes,
                    float* logits, float* hidden, int threads) {
  static const Layout layout = make_layout();
  const auto forward = table().forward;
  std::vector<std::unique_ptr<Scratch>> scratch(threads < 1 ? 1 : threads);
  parallel_for(boards, threads, [&](int64_t board, int worker) {
    if (!scratch[worker]) scratch[worker] = std::make_unique<Scratch>();
    forward(layout, *scratch[worker], tokens + board * kCells, weights, iterations, codes,
            logits + board * kCells * (kDigits + 1), hidden + board * kCells * kHidden);
  });
}

}  // namespace mdmi
