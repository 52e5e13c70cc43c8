// The table of contents of the native part: every operator's schema, and nothing else.
//
// The kernels register themselves: cpu/*.cpp for CPU tensors, cuda/*.cu for CUDA tensors. Everything goes through the
// LibTorch stable ABI, so one build serves later torch releases and compiles in seconds. The contracts, checked once for
// every device, are in gemm.hpp and fused.hpp.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(mpcompare, m) {
  // out = alpha op(a) op(b) + beta out, op(x) = x or x^T
  m.def(
      "gemm(Tensor a, Tensor b, Tensor(c!) out, *, bool trans_a=False, bool trans_b=False, "
      "float alpha=1.0, float beta=0.0, bool fp16_sums=False) -> ()");
  // the same by the naive triple loop, on a CPU: what the tests compare with
  m.def(
      "gemm_reference(Tensor a, Tensor b, Tensor(c!) out, *, bool trans_a=False, bool trans_b=False, "
      "float alpha=1.0, float beta=0.0) -> ()");
  // out = x w + bias, or relu of that: a layer's forward, rounded once
  m.def(
      "linear(Tensor x, Tensor w, Tensor bias, Tensor(a!) out, *, bool relu=False, bool search=True, "
      "bool tf32=False) -> ()");
  // dw = z^T da: a layer's weight gradient
  m.def("weight_grad(Tensor z, Tensor da, Tensor(a!) dw, *, bool search=True, bool tf32=False) -> ()");
  // dw = z^T da; then z = da w^T where z > 0, else 0, in place; dbias = column sums of the new z
  m.def(
      "linear_backward(Tensor da, Tensor w, Tensor(a!) z, Tensor(b!) dw, Tensor(c!) dbias, *, bool search=True, "
      "bool tf32=False) -> ()");
  // loss, and the gradient of loss_scale * loss with respect to logits, and its column sums
  m.def(
      "cross_entropy(Tensor logits, Tensor y, Tensor(a!) dlogits, Tensor(b!) dbias, Tensor(c!) loss, "
      "Tensor loss_scale) -> ()");
  m.def(
      "mse(Tensor output, Tensor y, Tensor(a!) doutput, Tensor(b!) dbias, Tensor(c!) loss, Tensor loss_scale) -> ()");
  // found_inf = 1 where x holds inf or NaN, else it stays
  m.def("non_finite(Tensor x, Tensor(a!) found_inf) -> ()");
  // as non_finite; and norm += sum (x / loss_scale)^2, or the largest |x / loss_scale| of norm and x
  m.def(
      "grad_norm(Tensor x, Tensor loss_scale, Tensor(a!) found_inf, Tensor(b!) norm, *, bool infinity=False) -> ()");
  // unless found_inf a step of torch.optim.SGD; in any case params = master, rounded
  m.def(
      "sgd(Tensor(a!) master, Tensor(b!)? velocity, Tensor(c!)? params, Tensor grad, Tensor lr, Tensor loss_scale, "
      "Tensor found_inf, Tensor? clip, *, float momentum=0.0, bool nesterov=False, float weight_decay=0.0) -> ()");
  // the same of torch.optim.AdamW, or of torch.optim.Adam
  m.def(
      "adam(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? params, Tensor grad, Tensor lr, "
      "Tensor step, Tensor loss_scale, Tensor found_inf, Tensor? clip, *, float beta1, float beta2, float eps, "
      "float weight_decay=0.0, bool decoupled=True) -> ()");
  // the dynamic loss scale of the next step: grow after many good steps, back off after an overflow
  m.def(
      "update_scale(Tensor(a!) loss_scale, Tensor(b!) growth_tracker, Tensor(c!) overflows_left, Tensor found_inf, *, "
      "float growth_factor, float backoff_factor, int growth_interval, float min_scale, int hysteresis) -> ()");
  // bytes that the CPU operators keep for packing, in all threads: torch's allocator knows nothing of them
  m.def("workspace_bytes() -> int");
  // whether bf16 products use AMX tiles: 0 built without, 1 yes, 2 built with but refused by Linux or switched off
  m.def("amx() -> int");
  // the largest workspace that a cublasLt product has taken from torch's allocator, for as long as it ran
  m.def("lt_workspace_bytes() -> int");
  // kinds of products that cublasLt could not do, so that cuBLAS and kernels around it did
  m.def("lt_unsupported_products() -> int");
}
