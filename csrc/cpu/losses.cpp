// cross_entropy and mse on the CPU.
//
// Rows are cut into blocks that depend on n alone. Each block sums its loss and its columns by itself, and the sums of
// the blocks are added in order, so the result does not depend on the number of threads.

#include "../fused.hpp"
#include "dispatch.hpp"

#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t MIN_BLOCK_ROWS = 64;  // a smaller block is not worth its overhead
constexpr int64_t MAX_BLOCKS = 128;     // bounds the memory of the column sums: 128 c floats
constexpr int64_t CHUNK = 4096;         // elements of an fp32 scratch of 16 KB, which stays in L1; at least a row
constexpr int64_t CACHE_LINE = 64 / sizeof(float);

// Stores the rows of g [rows, c] rounded to T, ld apart, and leaves the rounded values in g.
template <class T>
void round_rows(T* dst, int64_t ld, float* g, int64_t rows, int64_t c) {
  for (int64_t r = 0; r < rows; r++)
    for_vectors(0, c, [=](int64_t j, int64_t n) {
      store(dst + r * ld + j, load(g + r * c + j, n), n);
      store(g + r * c + j, load(dst + r * ld + j, n), n);
    });
}

void add_rows(float* __restrict sums, const float* __restrict g, int64_t rows, int64_t c) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < c; j++) sums[j] += g[r * c + j];
}

// Makes one pass over n x c, writes the gradient and its column sums, and returns the sum of all losses.
// rows_of(i, rows, g) computes the fp32 gradient of rows [i, i + rows) into g [rows, c] and returns the sum of their
// losses.
template <class T, class F>
double loss_pass(LossShape s, T* gradient, T* dbias, F rows_of) {
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int64_t block = std::max(MIN_BLOCK_ROWS, ceil_div(s.n, MAX_BLOCKS)), blocks = ceil_div(s.n, block);
  const int64_t step = std::min(block, std::max<int64_t>(1, CHUNK / s.c));
  const int64_t scratch_size = ceil_div(step * s.c, CACHE_LINE) * CACHE_LINE + CACHE_LINE;  // no shared cache line
  std::vector<float> scratch(threads * scratch_size), sums(blocks * s.c);
  std::vector<double> losses(blocks);

#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    float* g = scratch.data() + omp_get_thread_num() * scratch_size;
    const int64_t end = std::min(s.n, (b + 1) * block);
    for (int64_t i = b * block; i < end; i += step) {
      const int64_t rows = std::min(step, end - i);
      losses[b] += rows_of(i, rows, g);
      round_rows(gradient + i * s.ldg, s.ldg, g, rows, s.c);
      add_rows(&sums[b * s.c], g, rows, s.c);
    }
  }

  std::vector<double> total(s.c);
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t j = 0; j < s.c; j++) total[j] += sums[b * s.c + j];
  for (int64_t j = 0; j < s.c; j++) dbias[j] = static_cast<T>(static_cast<float>(total[j]));
  double loss = 0;
  for (double of_block : losses) loss += of_block;
  return loss;
}

float max_of(const float* x, int64_t n) {
  float top = x[0];
  int64_t i = 0;
  if (n >= VL) {
    vec tops = load(x);
    for (i = VL; i + VL <= n; i += VL) tops = load(x + i) > tops ? load(x + i) : tops;
    for (int l = 0; l < VL; l++) top = std::max(top, tops[l]);
  }
  for (; i < n; i++) top = std::max(top, x[i]);
  return top;
}

float sum_of(const float* x, int64_t n) {
  vec sums = {};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) sums += load(x + i);
  float total = sum(sums);
  for (; i < n; i++) total += x[i];
  return total;
}

// Returns exp(x) for x <= 0 or NaN, within 1 unit in the last place, and 0 instead of a subnormal result.
// With x = k ln 2 + r and |r| <= ln 2 / 2, exp(x) = 2^k exp(r); the polynomial for exp(r) comes from Cephes' expf.
inline vec exp_of_nonpositive(vec x) {
  constexpr float ROUND = 0x1.8p23f;  // y + ROUND holds y, rounded to an integer, in its low bits
  const vec shifted = x * 1.44269504f + ROUND, k = shifted - ROUND;
  const vec r = x - k * 0.693359375f - k * -2.12194440e-4f;
  vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return x < -87.3365f ? vec{} : p * floats((bits(shifted) + 127u) << 23);
}

// g = (softmax - onehot(y)) scale; returns the sum of logsumexp - logit_y. Logits are shifted by the maximum of their
// row, so exp cannot overflow. NaN, and inf - inf, make the sum of their row NaN.
template <class L>
double cross_entropy_rows(const L* logits, int64_t ld, const int64_t* y, int64_t rows, int64_t c, float scale,
                          float* g) {
  double loss = 0;
  for (int64_t r = 0; r < rows; r++) {
    float* row = g + r * c;
    for_vectors(0, c, [=](int64_t j, int64_t n) { store(row + j, load(logits + r * ld + j, n), n); });
    const float top = max_of(row, c);
    for (int64_t j = 0; j < c; j++) row[j] -= top;
    loss -= row[y[r]];
  }
  for_vectors(0, rows * c, [=](int64_t i, int64_t n) { store(g + i, exp_of_nonpositive(load(g + i, n)), n); });
  for (int64_t r = 0; r < rows; r++) {
    float* row = g + r * c;
    const float total = sum_of(row, c), at_y = (row[y[r]] / total - 1) * scale;
    for (int64_t j = 0; j < c; j++) row[j] = row[j] / total * scale;
    row[y[r]] = at_y;
    loss += std::log(total);
  }
  return loss;
}

void cross_entropy(Tensor logits, Tensor y, Tensor dlogits, Tensor dbias, Tensor loss, Tensor loss_scale) {
  const LossShape s = check_cross_entropy(logits, y, dlogits, dbias, loss, loss_scale);
  const int64_t* labels = data<int64_t>(y);
  for (int64_t i = 0; i < s.n; i++)
    STD_TORCH_CHECK(0 <= labels[i] && labels[i] < s.c, "cross_entropy: y[", i, "] is ", labels[i],
                    ", expected a class from 0 to ", s.c - 1);
  const double count = static_cast<double>(s.n);
  const float scale = static_cast<float>(*data<float>(loss_scale) / count);
  by_dtypes(dlogits, logits, [&](auto t, auto l) {
    using T = decltype(t);
    const auto* x = data<decltype(l)>(logits);
    const double sum =
        loss_pass(s, mutable_data<T>(dlogits), mutable_data<T>(dbias), [=](int64_t i, int64_t rows, float* g) {
          return cross_entropy_rows(x + i * s.ld, s.ld, labels + i, rows, s.c, scale, g);
        });
    *mutable_data<float>(loss) = static_cast<float>(sum / count);
  });
}

// g = (output - y) scale; returns the sum of squares of output - y.
template <class L>
double mse_rows(const L* output, int64_t ld, const float* y, int64_t rows, int64_t c, float scale, float* g) {
  double total = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t first = 0; first < c; first += CHUNK) {
      vec squares = {};
      for_vectors(first, std::min(c, first + CHUNK), [&](int64_t j, int64_t n) {
        const vec d = load(output + r * ld + j, n) - load(y + r * c + j, n);
        squares += d * d;
        store(g + r * c + j, d * scale, n);
      });
      total += sum(squares);
    }
  return total;
}

void mse(Tensor output, Tensor y, Tensor doutput, Tensor dbias, Tensor loss, Tensor loss_scale) {
  const LossShape s = check_mse(output, y, doutput, dbias, loss, loss_scale);
  const float* targets = data<float>(y);
  const double count = static_cast<double>(s.n) * static_cast<double>(s.c);
  const float scale = static_cast<float>(2.0 * *data<float>(loss_scale) / count);
  by_dtypes(doutput, output, [&](auto t, auto l) {
    using T = decltype(t);
    const auto* x = data<decltype(l)>(output);
    const double sum =
        loss_pass(s, mutable_data<T>(doutput), mutable_data<T>(dbias), [=](int64_t i, int64_t rows, float* g) {
          return mse_rows(x + i * s.ld, s.ld, targets + i * s.c, rows, s.c, scale, g);
        });
    *mutable_data<float>(loss) = static_cast<float>(sum / count);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CPU, m) {
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("mse", TORCH_BOX(&mse));
}
