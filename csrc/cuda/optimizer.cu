// non_finite, sgd and update_scale on CUDA: what happens to gradients once they are there. Nothing here is read by the
// host, so a whole step can be one CUDA graph.

#include "../loss_scale.hpp"
#include "kernel.hpp"

#include <torch/csrc/stable/library.h>

namespace {

// Every thread that finds one writes the same 1.
template <class T, int N>
__global__ void __launch_bounds__(THREADS) non_finite_kernel(int64_t packs, const Pack<T, N>* x, float* found_inf) {
  bool found = false;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    const Pack<T, N> pack = x[i];
    for (int k = 0; k < N; k++) found |= !isfinite(widen(pack.x[k]));
  }
  if (found) *found_inf = 1;
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS) sgd_kernel(int64_t packs, Pack<float, N>* master, Pack<float, N>* velocity,
                                                      Pack<T, N>* params, const Pack<T, N>* grad,
                                                      const float* loss_scale, const float* found_inf, float lr,
                                                      float momentum) {
  const bool skip = *found_inf != 0;
  const float inv_scale = static_cast<float>(1.0 / static_cast<double>(*loss_scale));
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    Pack<float, N> w = master[i];
    if (!skip) {
      const Pack<T, N> g = grad[i];
      Pack<float, N> v;
      for (int k = 0; k < N; k++) v.x[k] = inv_scale * widen(g.x[k]);
      if (velocity != nullptr) {
        const Pack<float, N> before = velocity[i];
        for (int k = 0; k < N; k++) v.x[k] = momentum * before.x[k] + v.x[k];
        velocity[i] = v;
      }
      for (int k = 0; k < N; k++) w.x[k] -= lr * v.x[k];
      master[i] = w;
    }
    if (params != nullptr) {  // may be grad: this thread has read what it now overwrites
      Pack<T, N> p;
      for (int k = 0; k < N; k++) p.x[k] = narrow<T>(w.x[k]);
      params[i] = p;
    }
  }
}

__global__ void update_scale_kernel(float* loss_scale, int32_t* growth_tracker, int32_t* overflows_left,
                                    const float* found_inf, ScaleRule rule) {
  next_scale(loss_scale, growth_tracker, overflows_left, *found_inf != 0, rule);
}

// ---- host

void non_finite(Tensor x, Tensor found_inf) {
  const int64_t count = check_non_finite(x, found_inf);
  const DeviceGuard device(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    const auto launch = [&](auto pack) {
      using P = decltype(pack);
      constexpr int N = sizeof(P) / sizeof(T);
      const int64_t packs = count / N;
      non_finite_kernel<T, N><<<grid_of(packs, THREADS), THREADS, 0, stream>>>(
          packs, static_cast<const P*>(x.const_data_ptr()), mutable_data<float>(found_inf));
    };
    constexpr int N = 16 / sizeof(T);
    if (count % N == 0 && is_aligned(x.const_data_ptr(), 16))
      launch(Pack<T, N>{});
    else
      launch(Pack<T, 1>{});
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

template <class T, int N>
void launch_sgd(int64_t count, const Tensor& master, const std::optional<Tensor>& velocity,
                const std::optional<Tensor>& params, const Tensor& grad, const Tensor& loss_scale,
                const Tensor& found_inf, float lr, float momentum, cudaStream_t stream) {
  using Wide = Pack<float, N>;
  using Low = Pack<T, N>;
  const int64_t packs = count / N;
  sgd_kernel<T, N><<<grid_of(packs, THREADS), THREADS, 0, stream>>>(
      packs, mutable_data<Wide>(master), mutable_data<Wide>(velocity), mutable_data<Low>(params), data<Low>(grad),
      data<float>(loss_scale), data<float>(found_inf), lr, momentum);
}

void sgd(Tensor master, std::optional<Tensor> velocity, std::optional<Tensor> params, Tensor grad, Tensor loss_scale,
         Tensor found_inf, double lr, double momentum) {
  const int64_t count = check_sgd(master, velocity, params, grad, loss_scale, found_inf, momentum);
  const DeviceGuard device(master.get_device_index());
  const cudaStream_t stream = current_stream(master);
  by_dtype(grad, [&](auto t) {
    using T = decltype(t);
    constexpr int N = 4;
    const bool packed = count % N == 0 && is_aligned(master.const_data_ptr(), sizeof(Pack<float, N>)) &&
                        (!velocity || is_aligned(velocity->const_data_ptr(), sizeof(Pack<float, N>))) &&
                        (!params || is_aligned(params->const_data_ptr(), sizeof(Pack<T, N>))) &&
                        is_aligned(grad.const_data_ptr(), sizeof(Pack<T, N>));
    const auto launch = packed ? launch_sgd<T, N> : launch_sgd<T, 1>;
    launch(count, master, velocity, params, grad, loss_scale, found_inf, static_cast<float>(lr),
           static_cast<float>(momentum), stream);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
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
  m.impl("sgd", TORCH_BOX(&sgd));
  m.impl("update_scale", TORCH_BOX(&update_scale));
}
