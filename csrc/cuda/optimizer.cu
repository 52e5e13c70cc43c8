// The operators on finished gradients, on CUDA: non_finite, grad_norm, sgd, adam and update_scale. The host reads no
// result, so a whole step can be one CUDA graph.

#include "../adam.hpp"
#include "../loss_scale.hpp"
#include "../norm.hpp"
#include "kernel.hpp"

#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <type_traits>

namespace {

__device__ inline float inverse(float loss_scale) { return static_cast<float>(1.0 / static_cast<double>(loss_scale)); }

// Every thread that finds inf or NaN writes the same 1.
template <class T, int N>
__global__ void __launch_bounds__(THREADS) non_finite_kernel(int64_t packs, const Pack<T, N>* x, float* found_inf) {
  bool found = false;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    const Pack<T, N> pack = x[i];
    for (int k = 0; k < N; k++) found |= !isfinite(widen(pack.x[k]));
  }
  if (found) *found_inf = 1;
}

// The operation that combines two parts of a norm, or two elements.
struct Combine {
  bool infinity;
  __device__ double operator()(double a, double b) const { return infinity ? larger(a, b) : a + b; }
};

// First half: partials[b] = sum of (inv_scale x)^2 over the elements of block b, or the largest |inv_scale x|.
template <class T, int N>
__global__ void __launch_bounds__(THREADS) norm_kernel(int64_t packs, const Pack<T, N>* x, const float* loss_scale,
                                                       bool infinity, float* found_inf, double* partials) {
  const float inv_scale = inverse(*loss_scale);
  const Combine combine{infinity};
  bool found = false;
  double total = 0;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    const Pack<T, N> pack = x[i];
    for (int k = 0; k < N; k++) {
      found |= !isfinite(widen(pack.x[k]));
      const double g = inv_scale * widen(pack.x[k]);  // rounded to fp32
      total = combine(total, infinity ? fabs(g) : g * g);
    }
  }
  if (found) *found_inf = 1;  // every thread that finds inf or NaN writes the same 1
  store_block_total(total, combine, &partials[blockIdx.x]);
}

// Second half, by one block: combines the partials in a fixed order, then adds them to norm.
__global__ void __launch_bounds__(THREADS) add_norm_kernel(const double* partials, int64_t blocks, bool infinity,
                                                           double* norm) {
  const Combine combine{infinity};
  double total = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += THREADS) total = combine(total, partials[b]);
  __shared__ double all;
  store_block_total(total, combine, &all);
  if (threadIdx.x == 0) *norm = combine(*norm, all);  // thread 0 wrote all itself
}

// The values that a step decides, on the device; clip may be null.
struct Decided {
  const float *lr, *loss_scale, *found_inf, *clip;
};

// Returns the unscaled and clipped gradients of a pack; a factor of 1 changes nothing.
template <class T, int N>
__device__ Pack<float, N> unscaled(const Pack<T, N>& grad, float inv_scale, float clip) {
  Pack<float, N> g;
  for (int k = 0; k < N; k++) g.x[k] = clip * (inv_scale * widen(grad.x[k]));
  return g;
}

template <class T, int N>
__device__ Pack<T, N> narrowed(const Pack<float, N>& w) {
  Pack<T, N> p;
  for (int k = 0; k < N; k++) p.x[k] = narrow<T>(w.x[k]);
  return p;
}

struct SgdRule {
  float momentum, weight_decay;
  bool nesterov;
};

template <class T, int N>
__global__ void __launch_bounds__(THREADS) sgd_kernel(int64_t packs, Pack<float, N>* master, Pack<float, N>* velocity,
                                                      Pack<T, N>* params, const Pack<T, N>* grad, Decided decided,
                                                      SgdRule rule) {
  const bool skip = *decided.found_inf != 0;
  const float lr = *decided.lr, inv_scale = inverse(*decided.loss_scale);
  const float clip = decided.clip == nullptr ? 1.0f : *decided.clip;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    Pack<float, N> w = master[i];
    if (!skip) {
      Pack<float, N> g = unscaled(grad[i], inv_scale, clip);
      if (rule.weight_decay != 0)
        for (int k = 0; k < N; k++) g.x[k] += rule.weight_decay * w.x[k];
      if (velocity != nullptr) {
        Pack<float, N> v = velocity[i];
        for (int k = 0; k < N; k++) {
          v.x[k] = rule.momentum * v.x[k] + g.x[k];
          g.x[k] = rule.nesterov ? g.x[k] + rule.momentum * v.x[k] : v.x[k];
        }
        velocity[i] = v;
      }
      for (int k = 0; k < N; k++) w.x[k] -= lr * g.x[k];
      master[i] = w;
    }
    if (params != nullptr) params[i] = narrowed<T, N>(w);  // params may be grad, which was read
  }
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS) adam_kernel(int64_t packs, Pack<float, N>* master, Pack<float, N>* exp_avg,
                                                       Pack<float, N>* exp_avg_sq, Pack<T, N>* params,
                                                       const Pack<T, N>* grad, Decided decided, const float* step,
                                                       AdamRule rule) {
  __shared__ AdamStep of_all;  // computed once a block: fp64 is slow on many GPUs
  if (threadIdx.x == 0) of_all = adam_step(rule, *decided.lr, *step);
  __syncthreads();
  const AdamStep s = of_all;
  const bool skip = *decided.found_inf != 0;
  const float inv_scale = inverse(*decided.loss_scale), clip = decided.clip == nullptr ? 1.0f : *decided.clip;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    Pack<float, N> w = master[i];
    if (!skip) {
      Pack<float, N> g = unscaled(grad[i], inv_scale, clip), m = exp_avg[i], v = exp_avg_sq[i];
      for (int k = 0; k < N; k++) {
        if (s.coupled != 0) g.x[k] += s.coupled * w.x[k];
        m.x[k] = s.first.of(m.x[k], g.x[k]);
        v.x[k] = s.second.of(v.x[k], g.x[k] * g.x[k]);
        w.x[k] = s.keep * w.x[k] - s.size * m.x[k] / (sqrtf(v.x[k]) * s.of_root + s.eps);
      }
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      master[i] = w;
    }
    if (params != nullptr) params[i] = narrowed<T, N>(w);  // as in sgd_kernel
  }
}

__global__ void update_scale_kernel(float* loss_scale, int32_t* growth_tracker, int32_t* overflows_left,
                                    const float* found_inf, ScaleRule rule) {
  next_scale(loss_scale, growth_tracker, overflows_left, *found_inf != 0, rule);
}

// ---- host

// Runs launch(N, packs): N is an integral_constant, the elements that a thread reads at once, and packs the number of
// packs of N in count. N is SIZE where count is a multiple of it and the tensors are aligned for it, and otherwise 1.
template <int SIZE, class Launch>
void launch_packs(int64_t count, bool aligned, Launch launch) {
  if (aligned && count % SIZE == 0)
    launch(std::integral_constant<int, SIZE>{}, count / SIZE);
  else
    launch(std::integral_constant<int, 1>{}, count);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Runs launch(t, n, packs, stream) to read the count elements of x once, 16 bytes at a time where that is possible: t has
// the type of an element, and n is N as launch_packs gives it.
template <class Launch>
void launch_reading(const Tensor& x, int64_t count, Launch launch) {
  const DeviceGuard device(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  by_dtype(x, [&](auto t) {
    launch_packs<16 / sizeof(t)>(count, is_aligned(x.const_data_ptr(), 16),
                                 [&](auto n, int64_t packs) { launch(t, n, packs, stream); });
  });
}

void non_finite(Tensor x, Tensor found_inf) {
  const int64_t count = check_non_finite(x, found_inf);
  launch_reading(x, count, [&](auto t, auto n, int64_t packs, cudaStream_t stream) {
    using T = decltype(t);
    constexpr int N = decltype(n)::value;
    non_finite_kernel<T, N><<<grid_of(packs, THREADS), THREADS, 0, stream>>>(packs, data<Pack<T, N>>(x),
                                                                             mutable_data<float>(found_inf));
  });
}

void grad_norm(Tensor x, Tensor loss_scale, Tensor found_inf, Tensor norm, bool infinity) {
  const int64_t count = check_grad_norm(x, loss_scale, found_inf, norm);
  launch_reading(x, count, [&](auto t, auto n, int64_t packs, cudaStream_t stream) {
    using T = decltype(t);
    constexpr int N = decltype(n)::value;
    const int64_t blocks = grid_of(packs, THREADS);
    const Tensor partials = torch::stable::new_empty(x, {blocks}, ScalarType::Double);
    norm_kernel<T, N><<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(
        packs, data<Pack<T, N>>(x), data<float>(loss_scale), infinity, mutable_data<float>(found_inf),
        mutable_data<double>(partials));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    add_norm_kernel<<<1, THREADS, 0, stream>>>(data<double>(partials), blocks, infinity, mutable_data<double>(norm));
  });
}

constexpr int PACK = 4;  // elements that an optimizer reads at once

// Returns whether every tensor is aligned for packs of PACK elements: the fp32 ones, and the low ones, which have dtype
// T. A null pointer stands for no tensor.
template <class T>
bool aligned(std::initializer_list<const Tensor*> fp32, std::initializer_list<const Tensor*> low) {
  const auto is = [](const Tensor* x, size_t bytes) { return !x || is_aligned(x->const_data_ptr(), bytes); };
  for (const Tensor* x : fp32)
    if (!is(x, sizeof(Pack<float, PACK>))) return false;
  for (const Tensor* x : low)
    if (!is(x, sizeof(Pack<T, PACK>))) return false;
  return true;
}

const Tensor* address(const std::optional<Tensor>& x) { return x ? &*x : nullptr; }

Decided decided(const Tensor& lr, const Tensor& loss_scale, const Tensor& found_inf,
                const std::optional<Tensor>& clip) {
  return {data<float>(lr), data<float>(loss_scale), data<float>(found_inf), clip ? data<float>(*clip) : nullptr};
}

void sgd(Tensor master, std::optional<Tensor> velocity, std::optional<Tensor> params, Tensor grad, Tensor lr,
         Tensor loss_scale, Tensor found_inf, std::optional<Tensor> clip, double momentum, bool nesterov,
         double weight_decay) {
  const int64_t count =
      check_sgd(master, velocity, params, grad, lr, loss_scale, found_inf, clip, momentum, nesterov);
  const DeviceGuard device(master.get_device_index());
  const cudaStream_t stream = current_stream(master);
  const SgdRule rule{static_cast<float>(momentum), static_cast<float>(weight_decay), nesterov};
  by_dtype(grad, [&](auto t) {
    using T = decltype(t);
    const bool fits = aligned<T>({&master, address(velocity)}, {address(params), &grad});
    launch_packs<PACK>(count, fits, [&](auto n, int64_t packs) {
      constexpr int N = decltype(n)::value;
      using Wide = Pack<float, N>;
      using Low = Pack<T, N>;
      sgd_kernel<T, N><<<grid_of(packs, THREADS), THREADS, 0, stream>>>(
          packs, mutable_data<Wide>(master), mutable_data<Wide>(velocity), mutable_data<Low>(params), data<Low>(grad),
          decided(lr, loss_scale, found_inf, clip), rule);
    });
  });
}

void adam(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> params, Tensor grad, Tensor lr,
          Tensor step, Tensor loss_scale, Tensor found_inf, std::optional<Tensor> clip, double beta1, double beta2,
          double eps, double weight_decay, bool decoupled) {
  const int64_t count = check_adam(master, exp_avg, exp_avg_sq, params, grad, lr, step, loss_scale, found_inf, clip,
                                   beta1, beta2, eps);
  const DeviceGuard device(master.get_device_index());
  const cudaStream_t stream = current_stream(master);
  const AdamRule rule{beta1, beta2, eps, weight_decay, decoupled};
  by_dtype(grad, [&](auto t) {
    using T = decltype(t);
    const bool fits = aligned<T>({&master, &exp_avg, &exp_avg_sq}, {address(params), &grad});
    launch_packs<PACK>(count, fits, [&](auto n, int64_t packs) {
      constexpr int N = decltype(n)::value;
      using Wide = Pack<float, N>;
      using Low = Pack<T, N>;
      adam_kernel<T, N><<<grid_of(packs, THREADS), THREADS, 0, stream>>>(
          packs, mutable_data<Wide>(master), mutable_data<Wide>(exp_avg), mutable_data<Wide>(exp_avg_sq),
          mutable_data<Low>(params), data<Low>(grad), decided(lr, loss_scale, found_inf, clip), data<float>(step), rule);
    });
  });
}

void update_scale(Tensor loss_scale, Tensor growth_tracker, Tensor overflows_left, Tensor found_inf,
                  double growth_factor, double backoff_factor, int64_t growth_interval, double min_scale,
                  int64_t hysteresis) {
  check_update_scale(loss_scale, growth_tracker, overflows_left, found_inf);
  const DeviceGuard device(loss_scale.get_device_index());
  update_scale_kernel<<<1, 1, 0, current_stream(loss_scale)>>>(
      mutable_data<float>(loss_scale), mutable_data<int32_t>(growth_tracker), mutable_data<int32_t>(overflows_left),
      data<float>(found_inf), {growth_factor, backoff_factor, growth_interval, static_cast<float>(min_scale), hysteresis});
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CUDA, m) {
  m.impl("non_finite", TORCH_BOX(&non_finite));
  m.impl("grad_norm", TORCH_BOX(&grad_norm));
  m.impl("sgd", TORCH_BOX(&sgd));
  m.impl("adam", TORCH_BOX(&adam));
  m.impl("update_scale", TORCH_BOX(&update_scale));
}
