// A product whose result is known, by which an algorithm of cublasLt shows what the documents leave open.
//
// Each row of a is (c, 0, 0, ...), b is full of c, and all of the bias is one number, so that one number is the result:
//
//   c^2 + bias, c = 1 + 2^-7, and c^2 = 1 + 2^-6 + 2^-14 has more digits than fp16 and bf16
//
// A bias of -(1 + 2^-6) leaves 2^-14 if c^2 + bias is rounded once, and 0 if c^2 was rounded, too: some algorithms
// store the product and add the bias in a second kernel. A bias of NaN must leave NaN, also behind relu, which is
// documented as max(x, 0).
#pragma once
#include "kernel.hpp"

#include <cmath>

namespace {

// x_ij = first where j = 0, else other
template <class T>
__global__ void __launch_bounds__(THREADS) fill_kernel(T* x, int64_t ld, int64_t m, int64_t n, float first,
                                                       float other) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads())
    x[k / n * ld + k % n] = narrow<T>(k % n == 0 ? first : other);
}

// *found = 1 if an element of x differs from value; NaN does not differ from NaN.
template <class T>
__global__ void __launch_bounds__(THREADS) find_other_kernel(const T* x, int64_t ld, int64_t m, int64_t n, float value,
                                                             int32_t* found) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads()) {
    const float y = widen(x[k / n * ld + k % n]);
    if (y != value && !(y != y && value != value)) *found = 1;
  }
}

// The operands stand in for the operands of out = a b + bias. They have the same distance between rows, and addresses
// that are aligned alike: what cublasLt does may depend on both.
class Probe {
 public:
  Probe(const Tensor& a, const Tensor& b, const Tensor& out, const void* bias, cudaStream_t stream)
      : a_(a, a.const_data_ptr(), a.size(0) * leading_dimension(a)),
        b_(b, b.const_data_ptr(), b.size(0) * leading_dimension(b)),
        bias_(out, bias, out.size(1)), out_(out), stream_(stream) {
    fill(a_, a, a.size(0), a.size(1), C, 0);
    fill(b_, b, b.size(0), b.size(1), C, C);
  }

  const void* a() const { return a_.begin; }
  const void* b() const { return b_.begin; }
  const void* bias() const { return bias_.begin; }
  void set_bias(float value) { fill(bias_, out_, 1, out_.size(1), value, value); }

  // Returns whether all elements of out have this value; waits for the stream.
  bool result_is(float value) const {
    const Tensor found = torch::stable::new_empty(out_, {1}, ScalarType::Int);
    int32_t other = 0;
    STD_CUDA_CHECK(cudaMemsetAsync(found.mutable_data_ptr(), 0, sizeof other, stream_));
    by_dtype(out_, [&](auto t) {
      using T = decltype(t);
      const int64_t m = out_.size(0), n = out_.size(1);
      find_other_kernel<T><<<grid_of(m * n, THREADS), THREADS, 0, stream_>>>(
          data<T>(out_), leading_dimension(out_), m, n, value, mutable_data<int32_t>(found));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
    STD_CUDA_CHECK(cudaMemcpyAsync(&other, found.const_data_ptr(), sizeof other, cudaMemcpyDeviceToHost, stream_));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return other == 0;
  }

  static constexpr float C = 1 + 0x1p-7f, ROUNDED = 1 + 0x1p-6f, REST = 0x1p-14f;  // C^2 = ROUNDED + REST

 private:
  struct StandIn {
    StandIn(const Tensor& like, const void* original, int64_t count)
        : memory(torch::stable::new_empty(like, {count * static_cast<int64_t>(like.element_size()) + 256},
                                          ScalarType::Byte)),
          begin(static_cast<char*>(memory.mutable_data_ptr()) + reinterpret_cast<uintptr_t>(original) % 256) {}
    Tensor memory;  // torch aligns it to 256 bytes or more
    void* begin;
  };

  void fill(const StandIn& x, const Tensor& like, int64_t m, int64_t n, float first, float other) {
    by_dtype(like, [&](auto t) {
      using T = decltype(t);
      const int64_t ld = leading_dimension(like);
      fill_kernel<T><<<grid_of(m * n, THREADS), THREADS, 0, stream_>>>(static_cast<T*>(x.begin), ld, m, n, first, other);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  StandIn a_, b_, bias_;
  const Tensor& out_;
  cudaStream_t stream_;
};

}  // namespace
