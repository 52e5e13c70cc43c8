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
      "float alpha=1.0, float beta=0.0) -> ()");
  // the same by the naive triple loop, on a CPU: what the tests compare with
  m.def(
      "gemm_reference(Tensor a, Tensor b, Tensor(c!) out, *, bool trans_a=False, bool trans_b=False, "
      "float alpha=1.0, float beta=0.0) -> ()");
  // out = x w + bias, or relu of that: a layer's forward, rounded once
  m.def("linear(Tensor x, Tensor w, Tensor bias, Tensor(a!) out, *, bool relu=False) -> ()");
  // z = da w^T where z > 0, else 0, in place; dbias = column sums of the new z
  m.def("relu_backward(Tensor da, Tensor w, Tensor(a!) z, Tensor(b!) dbias) -> ()");
  // loss, and the gradient of loss_scale * loss with respect to logits, and its column sums
  m.def(
      "cross_entropy(Tensor logits, Tensor y, Tensor(a!) dlogits, Tensor(b!) dbias, Tensor(c!) loss, *, "
      "float loss_scale=1.0) -> ()");
  m.def(
      "mse(Tensor output, Tensor y, Tensor(a!) doutput, Tensor(b!) dbias, Tensor(c!) loss, *, "
      "float loss_scale=1.0) -> ()");
  // g = inv_scale grad; v = momentum v + g; master -= lr v; params = master, rounded
  m.def(
      "sgd(Tensor(a!) master, Tensor(b!)? velocity, Tensor(c!)? params, Tensor grad, *, float lr, "
      "float momentum=0.0, float inv_scale=1.0) -> ()");
  // bytes that the CPU operators keep for packing, in all threads: torch's allocator knows nothing of them
  m.def("workspace_bytes() -> int");
}
