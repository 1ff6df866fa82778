// Forward pass of the Sudoku task's network (mdmi_fast/tasks/sudoku/model.py is its definition and its training): nine
// digit vectors of 16 numbers per cell, far too small for a library's matrix products.
#pragma once

#include <cstdint>

namespace mdmi {

namespace sudoku {
constexpr int kCells = 81, kDigits = 9, kWidth = 16, kVectors = kCells * kDigits, kCodes = 27;
constexpr int kDigitState = kWidth + 3;  // the vector, its probability p, -p log p, and the cell's entropy
constexpr int kHidden = kDigits * kDigitState + kCodes;
constexpr int kMatrix = kWidth * kWidth;
constexpr int kWeights = 2 * 3 * kWidth + 5 * kMatrix + 3 * kWidth;
constexpr int kUnits = 27;  // rows, then columns, then boxes

// Sums, and then messages, of one vector per digit and unit and one per cell.
struct Pools {
  float unit[kUnits * kDigits * kWidth];
  float cell[kCells * kWidth];
};

struct Scratch {
  float state[kVectors * kWidth];
  Pools sums, messages;
  float start[3 * kWidth], kind[3 * kWidth];  // of a vector whose cell is blank, holds this digit, holds another one
  uint8_t kinds[kVectors];
};

// Where each of the 729 vectors finds what its row, column, box and cell hold, in floats from the start of Pools.
struct Layout {
  uint16_t row[kVectors], column[kVectors], box[kVectors], cell[kVectors];
};

// The network on one board, compiled for one target.
struct Table {
  const char* isa;
  void (*forward)(const Layout& layout, Scratch& scratch, const int64_t* tokens, const float* weights, int iterations,
                  const float* codes, float* logits, float* hidden);
};

extern const Table table_scalar;
#if defined(__x86_64__)
extern const Table table_avx2;
extern const Table table_avx512;
extern const Table table_avx512bf16;
#elif defined(__aarch64__)
extern const Table table_neon;
#endif
}  // namespace sudoku

// tokens [boards, 81] in 0..9, weights [kWeights] in the order of model.py, codes [81, 27];
// logits [boards, 81, 10] and hidden [boards, 81, kHidden] are written.
void sudoku_forward(const int64_t* tokens, int64_t boards, const float* weights, int iterations, const float* codes,
                    float* logits, float* hidden, int threads);

}  // namespace mdmi
