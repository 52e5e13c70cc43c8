// The table of contents of the native operators: their schemas, and nothing else.
//
// The kernels register themselves: cpu/*.cpp for CPU tensors, cuda/*.cu for CUDA tensors. All code uses the LibTorch
// stable ABI only, so one build serves later torch releases and compiles in seconds. The contracts of the operators,
// checked once for every device, are in gemm.hpp and fused.hpp.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(mpcompare, m) {
  // the matrix product: out = alpha op(a) op(b) + beta out, op(x) = x or x^T
  m.def(
      "gemm(Tensor a, Tensor b, Tensor(c!) out, *, bool trans_a=False, bool trans_b=False, "
      "float alpha=1.0, float beta=0.0, bool fp16_sums=False) -> ()");
  // gemm by the naive triple loop, on a CPU; the tests compare with it
  m.def(
      "gemm_reference(Tensor a, Tensor b, Tensor(c!) out, *, bool trans_a=False, bool trans_b=False, "
      "float alpha=1.0, float beta=0.0) -> ()");
  // a layer's forward, rounded once: out = x w + bias, or relu(x w + bias)
  m.def(
      "linear(Tensor x, Tensor w, Tensor bias, Tensor(a!) out, *, bool relu=False, bool search=True, "
      "bool tf32=False) -> ()");
  // a layer's weight gradient: dw = z^T da
  m.def("weight_grad(Tensor z, Tensor da, Tensor(a!) dw, *, bool search=True, bool tf32=False) -> ()");
  // a layer's backward: dw = z^T da; then, in place, z = da w^T where z > 0, else 0; dbias = column sums of the new z
  m.def(
      "linear_backward(Tensor da, Tensor w, Tensor(a!) z, Tensor(b!) dw, Tensor(c!) dbias, *, bool search=True, "
      "bool tf32=False) -> ()");
  // the loss, the gradient of loss_scale * loss with respect to the logits, and the column sums of that gradient
  m.def(
      "cross_entropy(Tensor logits, Tensor y, Tensor(a!) dlogits, Tensor(b!) dbias, Tensor(c!) loss, "
      "Tensor loss_scale) -> ()");
  // the same for the mean squared error
  m.def(
      "mse(Tensor output, Tensor y, Tensor(a!) doutput, Tensor(b!) dbias, Tensor(c!) loss, Tensor loss_scale) -> ()");
  // the search for inf and NaN: found_inf = 1 if x holds any; otherwise found_inf stays as it is
  m.def("non_finite(Tensor x, Tensor(a!) found_inf) -> ()");
  // non_finite, and norm += sum (x / loss_scale)^2 or, with infinity, norm = max(norm, max |x / loss_scale|)
  m.def(
      "grad_norm(Tensor x, Tensor loss_scale, Tensor(a!) found_inf, Tensor(b!) norm, *, bool infinity=False) -> ()");
  // a step of torch.optim.SGD unless found_inf is set; then, in any case, params = master, rounded
  m.def(
      "sgd(Tensor(a!) master, Tensor(b!)? velocity, Tensor(c!)? params, Tensor grad, Tensor lr, Tensor loss_scale, "
      "Tensor found_inf, Tensor? clip, *, float momentum=0.0, bool nesterov=False, float weight_decay=0.0) -> ()");
  // the same for torch.optim.AdamW (decoupled=True) and torch.optim.Adam (decoupled=False)
  m.def(
      "adam(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? params, Tensor grad, Tensor lr, "
      "Tensor step, Tensor loss_scale, Tensor found_inf, Tensor? clip, *, float beta1, float beta2, float eps, "
      "float weight_decay=0.0, bool decoupled=True) -> ()");
  // the dynamic loss scale of the next step: it grows after growth_interval good steps, and backs off after an overflow
  m.def(
      "update_scale(Tensor(a!) loss_scale, Tensor(b!) growth_tracker, Tensor(c!) overflows_left, Tensor found_inf, *, "
      "float growth_factor, float backoff_factor, int growth_interval, float min_scale, int hysteresis) -> ()");
  // bytes that the CPU operators keep for packing in all threads, outside of torch's allocator
  m.def("workspace_bytes() -> int");
  // the use of AMX tiles by bf16 products: 0 not in this build, 1 used, 2 refused by Linux or switched off
  m.def("amx() -> int");
  // bytes of the largest workspace that a cublasLt product has taken from torch's allocator while it ran
  m.def("lt_workspace_bytes() -> int");
  // number of distinct products that cublasLt cannot compute; cuBLAS and kernels around it compute them
  m.def("lt_unsupported_products() -> int");
}
