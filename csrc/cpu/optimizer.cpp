// The operators on finished gradients, on the CPU: non_finite, grad_norm, sgd, adam and update_scale.

#include "../adam.hpp"
#include "../fused.hpp"
#include "../loss_scale.hpp"
#include "../norm.hpp"
#include "dispatch.hpp"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t BLOCK = 8192;  // elements that a thread takes at a time

int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

float inverse(const Tensor& loss_scale) {
  return static_cast<float>(1 / static_cast<double>(*data<float>(loss_scale)));
}

// Returns the clip factor, or 1, by which a product does not change.
float factor_of(const std::optional<Tensor>& clip) { return clip ? *data<float>(*clip) : 1; }

template <class T>
bool has_non_finite(const T* x, int64_t first, int64_t end) {
  vec zero_or_nan = {};  // 0 x is NaN if x is inf or NaN, else 0
  for_vectors(first, end, [&](int64_t i, int64_t n) { zero_or_nan += 0 * load(x + i, n); });
  return std::isnan(sum(zero_or_nan));
}

template <class T>
bool any_non_finite(const T* x, int64_t count) {
  bool found = false;
#pragma omp parallel for num_threads(threads()) schedule(static) reduction(|| : found) if (count > BLOCK)
  for (int64_t first = 0; first < count; first += BLOCK)
    found = found || has_non_finite(x, first, std::min(count, first + BLOCK));
  return found;
}

void non_finite(Tensor x, Tensor found_inf) {
  const int64_t count = check_non_finite(x, found_inf);
  by_dtype(x, [&](auto t) {
    if (any_non_finite(data<decltype(t)>(x), count)) *mutable_data<float>(found_inf) = 1;
  });
}

template <class T>
double sum_of_squares(const T* x, int64_t first, int64_t end, float inv_scale) {
  dvec sums[2] = {};
  for_vectors(first, end, [&](int64_t i, int64_t n) {
    dvec g[2];
    widen(inv_scale * load(x + i, n), &g[0], &g[1]);
    for (int k = 0; k < 2; k++) sums[k] += g[k] * g[k];
  });
  return sum(sums[0] + sums[1]);
}

// Returns the largest |inv_scale x|. Read as integers, the bits of |x| have the order of |x|, and NaN is the largest.
template <class T>
double largest_magnitude(const T* x, int64_t first, int64_t end, float inv_scale) {
  ivec top = {};
  for_vectors(first, end, [&](int64_t i, int64_t n) {
    const ivec magnitude = reinterpret_cast<ivec>(bits(inv_scale * load(x + i, n)) & 0x7fffffffu);
    top = magnitude > top ? magnitude : top;
  });
  const vec magnitudes = reinterpret_cast<vec>(top);
  double largest = 0;
  for (int l = 0; l < VL; l++) largest = larger(largest, magnitudes[l]);
  return largest;
}

// Adds up each block by itself and then the blocks in order, so the result does not depend on the number of threads.
template <class T>
void add_norm(const T* x, int64_t count, float inv_scale, bool infinity, float* found_inf, double* norm) {
  std::vector<double> parts(ceil_div(count, BLOCK));
  const int64_t blocks = static_cast<int64_t>(parts.size());
  bool found = false;
#pragma omp parallel for num_threads(threads()) schedule(static) reduction(|| : found) if (blocks > 1)
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = b * BLOCK, end = std::min(count, first + BLOCK);
    parts[b] = infinity ? largest_magnitude(x, first, end, inv_scale) : sum_of_squares(x, first, end, inv_scale);
    // Inf or NaN in x makes the part inf or NaN for any inv_scale. A finite x may overflow here, so x itself is
    // searched.
    if (!std::isfinite(parts[b])) found = found || has_non_finite(x, first, end);
  }
  for (const double part : parts) *norm = infinity ? larger(*norm, part) : *norm + part;
  if (found) *found_inf = 1;
}

void grad_norm(Tensor x, Tensor loss_scale, Tensor found_inf, Tensor norm, bool infinity) {
  const int64_t count = check_grad_norm(x, loss_scale, found_inf, norm);
  by_dtype(x, [&](auto t) {
    add_norm(data<decltype(t)>(x), count, inverse(loss_scale), infinity, mutable_data<float>(found_inf),
             mutable_data<double>(norm));
  });
}

struct SgdStep {
  float lr, momentum, weight_decay;
  bool nesterov;
};

template <class T>
void sgd_of(int64_t count, float* master, float* velocity, T* params, const T* grad, SgdStep s, float inv_scale,
            float clip, bool skip) {
#pragma omp parallel for num_threads(threads()) schedule(static) if (count > BLOCK)
  for (int64_t first = 0; first < count; first += BLOCK)
    for_vectors(first, std::min(count, first + BLOCK), [=](int64_t i, int64_t n) {
      vec w = load(master + i, n);
      if (!skip) {
        vec g = clip * (inv_scale * load(grad + i, n));
        if (s.weight_decay != 0) g += s.weight_decay * w;
        if (velocity) {
          const vec v = g + s.momentum * load(velocity + i, n);
          store(velocity + i, v, n);
          g = s.nesterov ? g + s.momentum * v : v;
        }
        w -= s.lr * g;
        store(master + i, w, n);
      }
      if (params) store(params + i, w, n);
    });
}

void sgd(Tensor master, std::optional<Tensor> velocity, std::optional<Tensor> params, Tensor grad, Tensor lr,
         Tensor loss_scale, Tensor found_inf, std::optional<Tensor> clip, double momentum, bool nesterov,
         double weight_decay) {
  const int64_t count =
      check_sgd(master, velocity, params, grad, lr, loss_scale, found_inf, clip, momentum, nesterov);
  const SgdStep step{*data<float>(lr), static_cast<float>(momentum), static_cast<float>(weight_decay), nesterov};
  by_dtype(grad, [&](auto zero) {
    using T = decltype(zero);
    sgd_of(count, mutable_data<float>(master), mutable_data<float>(velocity), mutable_data<T>(params), data<T>(grad),
           step, inverse(loss_scale), factor_of(clip), *data<float>(found_inf) != 0);
  });
}

template <class T>
void adam_of(int64_t count, float* master, float* exp_avg, float* exp_avg_sq, T* params, const T* grad, AdamStep s,
             float inv_scale, float clip, bool skip) {
#pragma omp parallel for num_threads(threads()) schedule(static) if (count > BLOCK)
  for (int64_t first = 0; first < count; first += BLOCK)
    for_vectors(first, std::min(count, first + BLOCK), [=](int64_t i, int64_t n) {
      vec w = load(master + i, n);
      if (!skip) {
        vec g = clip * (inv_scale * load(grad + i, n)), m = load(exp_avg + i, n), v = load(exp_avg_sq + i, n);
        if (s.coupled != 0) g += s.coupled * w;
        m = s.first.of(m, g);
        v = s.second.of<vec>(v, g * g);
        w = s.keep * w - s.size * m / (square_root(v) * s.of_root + s.eps);
        store(exp_avg + i, m, n);
        store(exp_avg_sq + i, v, n);
        store(master + i, w, n);
      }
      if (params) store(params + i, w, n);
    });
}

void adam(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> params, Tensor grad, Tensor lr,
          Tensor step, Tensor loss_scale, Tensor found_inf, std::optional<Tensor> clip, double beta1, double beta2,
          double eps, double weight_decay, bool decoupled) {
  const int64_t count = check_adam(master, exp_avg, exp_avg_sq, params, grad, lr, step, loss_scale, found_inf, clip,
                                   beta1, beta2, eps);
  const AdamStep of_all =
      adam_step({beta1, beta2, eps, weight_decay, decoupled}, *data<float>(lr), *data<float>(step));
  by_dtype(grad, [&](auto zero) {
    using T = decltype(zero);
    adam_of(count, mutable_data<float>(master), mutable_data<float>(exp_avg), mutable_data<float>(exp_avg_sq),
            mutable_data<T>(params), data<T>(grad), of_all, inverse(loss_scale), factor_of(clip),
            *data<float>(found_inf) != 0);
  });
}

void update_scale(Tensor loss_scale, Tensor growth_tracker, Tensor overflows_left, Tensor found_inf,
                  double growth_factor, double backoff_factor, int64_t growth_interval, double min_scale,
                  int64_t hysteresis) {
  check_update_scale(loss_scale, growth_tracker, overflows_left, found_inf);
  next_scale(mutable_data<float>(loss_scale), mutable_data<int32_t>(growth_tracker),
             mutable_data<int32_t>(overflows_left), *data<float>(found_inf) != 0,
             {growth_factor, backoff_factor, growth_interval, static_cast<float>(min_scale), hysteresis});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CPU, m) {
  m.impl("non_finite", TORCH_BOX(&non_finite));
  m.impl("grad_norm", TORCH_BOX(&grad_norm));
  m.impl("sgd", TORCH_BOX(&sgd));
  m.impl("adam", TORCH_BOX(&adam));
  m.impl("update_scale", TORCH_BOX(&update_scale));
}
