#include "drivers/pair_layout.hpp"

namespace mdmi {
namespace {

void copy_row(const void* from, Dtype dtype, int64_t element, int64_t n, float* to) {
  switch (dtype) {
    case Dtype::f32:
      std::memcpy(to, static_cast<const float*>(from) + element, size_t(n) * sizeof(float));
      break;
    case Dtype::bf16:
      for (int64_t h = 0; h < n; ++h) to[h] = float_from_bf16(static_cast<const uint16_t*>(from)[element + h]);
      break;
    case Dtype::f16:
      for (int64_t h = 0; h < n; ++h) to[h] = float_from_f16(static_cast<const uint16_t*>(from)[element + h]);
      break;
    case Dtype::f64:
      for (int64_t h = 0; h < n; ++h) to[h] = float(static_cast<const double*>(from)[element + h]);
      break;
  }
}

}  // namespace

Gathered gather(const Halves& halves) {
  Gathered gathered;
  gathered.stride = padded(halves.width);
  gathered.n = halves.n;
  gathered.shift = halves.shift;
  for (int64_t b = 0; b < halves.batch; ++b) {
    gathered.first.push_back(int64_t(gathered.position.size()));
    for (int64_t i = 0; i < halves.n; ++i)
      if (halves.mask == nullptr || halves.mask[b * halves.mask_stride_b + i * halves.mask_stride_n]) {
        gathered.position.push_back(int32_t(i));
        if (halves.shift.relation != nullptr) gathered.sequence.push_back(int32_t(b));
      }
  }
  gathered.first.push_back(int64_t(gathered.position.size()));
  const auto fill = [&](Buffer<float>& storage, const void* data, Dtype dtype, int64_t stride_b, int64_t stride_n) {
    storage = make_buffer<float>(gathered.position.size() * size_t(gathered.stride));
    for (int64_t b = 0; b < halves.batch; ++b)
      for (int64_t row = gathered.first[size_t(b)]; row < gathered.first[size_t(b) + 1]; ++row) {
        float* to = storage.get() + row * gathered.stride;
        copy_row(data, dtype, b * stride_b + gathered.position[size_t(row)] * stride_n, halves.width, to);
        std::fill(to + halves.width, to + gathered.stride, 0.0f);
      }
    return storage.get();
  };
  gathered.u = fill(gathered.u_storage, halves.u, halves.u_dtype, halves.u_stride_b, halves.u_stride_n);
  gathered.v = halves.equal()
                   ? gathered.u
                   : fill(gathered.v_storage, halves.v, halves.v_dtype, halves.v_stride_b, halves.v_stride_n);
  return gathered;
}

PairLayout full_layout(const Gathered& gathered, int64_t n, bool symmetric) {
  PairLayout layout;
  for (size_t b = 0; b + 1 < gathered.first.size(); ++b)
    for (int64_t i = gathered.first[b]; i < gathered.first[b + 1]; ++i) {
      const int64_t matrix = int64_t(b) * n * n, position = gathered.position[size_t(i)];
      const int64_t begin = symmetric ? i + 1 : gathered.first[b];
      layout.add({i, begin, gathered.first[b + 1], matrix + position * n, 1, matrix + position, n, symmetric});
    }
  return layout;
}

PairLayout rows_layout(const Gathered& gathered, int64_t n, const int64_t* rows, int64_t n_rows) {
  PairLayout layout;
  for (size_t b = 0; b + 1 < gathered.first.size(); ++b) {
    const auto begin = gathered.position.begin() + gathered.first[b],
               end = gathered.position.begin() + gathered.first[b + 1];
    for (int64_t r = 0; r < n_rows; ++r) {
      const int64_t at = int64_t(b) * n_rows + r;
      const auto found = std::lower_bound(begin, end, rows[at]);
      if (rows[at] < 0 || found == end || *found != rows[at]) continue;  // no row, or not a masked one
      layout.add({int64_t(found - gathered.position.begin()), gathered.first[b], gathered.first[b + 1], at * n, 1, 0, 0,
                  false});
    }
  }
  return layout;
}

PairLayout band_layout(const Gathered& gathered, int64_t n, int64_t window, bool symmetric) {
  PairLayout layout;
  const int64_t width = 2 * window + 1;
  for (size_t b = 0; b + 1 < gathered.first.size(); ++b) {
    int64_t begin = gathered.first[b], end = begin;
    for (int64_t i = gathered.first[b]; i < gathered.first[b + 1]; ++i) {
      const int64_t position = gathered.position[size_t(i)], band = int64_t(b) * n * width;
      while (gathered.position[size_t(begin)] < position - window) ++begin;
      while (end < gathered.first[b + 1] && gathered.position[size_t(end)] <= position + window) ++end;
      // Entry (i, j) is in column window + j - i of row i, entry (j, i) in column window + i - j of row j.
      layout.add({i, symmetric ? i + 1 : begin, end, band + position * width + window - position, 1,
                  band + window + position, width - 1, symmetric});
    }
  }
  return layout;
}

}  // namespace mdmi
