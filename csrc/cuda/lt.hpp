// C = op(A) op(B), with or without a bias and relu in the store, by cublasLt with the fastest algorithm that it has.
//
// cublasLt is column-major as cuBLAS is, so C^T = op(B)^T op(A)^T is asked for: B first, M and N swapped (see
// cublas.hpp). Features are then the rows of cublasLt's D, and its bias has an element for each row. Sums are fp32: a
// split of K adds its parts in the compute type, never in the 16-bit output.
#pragma once
#include "../search.hpp"
#include "cublas.hpp"
#include "kernel.hpp"
#include "probes.hpp"

#include <cublasLt.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

namespace {

constexpr size_t MAX_WORKSPACE = size_t{8} << 20;  // held while a product runs; cuBLAS has 32 MB from torch on Hopper
constexpr int CANDIDATES = 16, TIMED_RUNS = 3;

// Bytes of the largest workspace that a product has taken so far.
inline std::atomic<int64_t> lt_workspace{0};

enum class Store { plain, bias, bias_relu };

struct LtCandidate {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

// All values that the choice of an algorithm may depend on.
using LtProblem = std::array<int64_t, 16>;

inline Fastest<LtProblem, LtCandidate> lt_fastest;

// The deleter of cublasLt's objects.
struct LtDestroy {
  void operator()(cublasLtMatmulDescOpaque_t* x) const { cublasLtMatmulDescDestroy(x); }
  void operator()(cublasLtMatrixLayoutOpaque_t* x) const { cublasLtMatrixLayoutDestroy(x); }
  void operator()(cublasLtMatmulPreferenceOpaque_t* x) const { cublasLtMatmulPreferenceDestroy(x); }
};
template <class T>
using LtOwner = std::unique_ptr<T, LtDestroy>;

// Returns our own handle for a GPU: torch's handle comes with a workspace of 32 MB. Ours holds no stream.
inline cublasLtHandle_t lt_handle(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) check(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

// Describes a stored row-major matrix of rows x columns as a column-major one of columns x rows.
inline LtOwner<cublasLtMatrixLayoutOpaque_t> lt_layout(const Tensor& x) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, cuda_dtype(x), static_cast<uint64_t>(x.size(1)),
                                   static_cast<uint64_t>(x.size(0)), leading_dimension(x)),
        "cublasLtMatrixLayoutCreate");
  return LtOwner<cublasLtMatrixLayoutOpaque_t>(layout);
}

template <class T>
void lt_set(const LtOwner<cublasLtMatmulDescOpaque_t>& desc, cublasLtMatmulDescAttributes_t name, T value) {
  check(cublasLtMatmulDescSetAttribute(desc.get(), name, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
}
template <class T>
void lt_set(const LtOwner<cublasLtMatmulPreferenceOpaque_t>& preference, cublasLtMatmulPreferenceAttributes_t name,
            T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), name, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

// Returns the largest power of two, up to 256, of which the address is a multiple.
inline uint32_t lt_alignment(const void* p) {
  uint32_t bytes = 256;
  while (!is_aligned(p, bytes)) bytes /= 2;
  return bytes;
}

// Permissions of the caller: to search the fastest algorithm by timing, and to round fp32 operands to TF32.
struct Choices {
  bool search, tf32;
};

inline cublasComputeType_t lt_compute_type(const Tensor& x, bool tf32) {
  return tf32 && x.scalar_type() == ScalarType::Float ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// A timer of the milliseconds between its construction and stop(), on the stream.
class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    STD_CUDA_CHECK(cudaEventCreate(&begin_));
    STD_CUDA_CHECK(cudaEventCreate(&end_));
    STD_CUDA_CHECK(cudaEventRecord(begin_, stream_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  float stop() {
    float ms = 0;
    STD_CUDA_CHECK(cudaEventRecord(end_, stream_));
    STD_CUDA_CHECK(cudaEventSynchronize(end_));
    STD_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_{}, end_{};
};

// Computes out = op(a) op(b), op(a) op(b) + bias or relu(op(a) op(b) + bias), as store says; returns false if cublasLt
// has no algorithm for it. out has the dtype of the operands, of which none is transposed if there is a bias. A search
// writes out several times, and is not possible during a capture, which waiting would end.
inline bool lt_matmul(const Tensor& a, const Tensor& b, const Tensor& out, bool trans_a, bool trans_b, Store store,
                      const void* bias, Choices choices) {
  const int device = out.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(out);
  const cublasLtHandle_t lt = lt_handle(device);
  const cublasComputeType_t compute = lt_compute_type(out, choices.tf32);

  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const LtOwner<cublasLtMatmulDescOpaque_t> desc(made);
  lt_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  lt_set(desc, CUBLASLT_MATMUL_DESC_TRANSB, trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (store != Store::plain) {
    lt_set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE,
           store == Store::bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_RELU_BIAS);
    lt_set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  const auto layout_a = lt_layout(b), layout_b = lt_layout(a), layout_d = lt_layout(out);  // B first

  const auto run_with = [&](const LtCandidate& candidate, const void* of_a, const void* of_b) {
    const float one = 1, zero = 0;  // scalars of the scale type, fp32
    const int64_t bytes = static_cast<int64_t>(candidate.workspace);
    const Tensor workspace = torch::stable::new_empty(out, {bytes}, ScalarType::Byte);
    return cublasLtMatmul(lt, desc.get(), &one, of_b, layout_a.get(), of_a, layout_b.get(), &zero, out.const_data_ptr(),
                          layout_d.get(), out.mutable_data_ptr(), layout_d.get(), &candidate.algorithm,
                          workspace.mutable_data_ptr(), candidate.workspace, stream);
  };
  const auto run = [&](const LtCandidate& candidate) {
    return run_with(candidate, a.const_data_ptr(), b.const_data_ptr());
  };

  const auto candidates = [&] {
    cudaStreamCaptureStatus capturing{};
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing));
    STD_TORCH_CHECK(capturing == cudaStreamCaptureStatusNone,
                    "cublasLt: run this product once before a capture, its algorithm is not known yet");
    cublasLtMatmulPreference_t made_preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&made_preference), "cublasLtMatmulPreferenceCreate");
    const LtOwner<cublasLtMatmulPreferenceOpaque_t> preference(made_preference);
    lt_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(MAX_WORKSPACE));
    lt_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));  // the scheme "none", 0, is allowed too
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, lt_alignment(b.const_data_ptr()));
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, lt_alignment(a.const_data_ptr()));
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, lt_alignment(out.const_data_ptr()));
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, lt_alignment(out.const_data_ptr()));
    std::array<cublasLtMatmulHeuristicResult_t, CANDIDATES> results{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(lt, desc.get(), layout_a.get(), layout_b.get(), layout_d.get(), layout_d.get(),
                                       preference.get(), CANDIDATES, results.data(), &found);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasLtMatmulAlgoGetHeuristic");
    std::vector<LtCandidate> list;
    for (int i = 0; i < found; i++)
      if (results[i].state == CUBLAS_STATUS_SUCCESS) list.push_back({results[i].algo, results[i].workspaceSize});
    return list;
  };

  std::optional<Probe> probe;
  const auto answers = [&](const LtCandidate& candidate, float probed_bias, float expected) {
    if (!probe) probe.emplace(a, b, out, bias, stream);
    probe->set_bias(probed_bias);
    lt_set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, probe->bias());
    check(run_with(candidate, probe->a(), probe->b()), "cublasLtMatmul");
    lt_set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    return probe->result_is(expected);
  };
  const bool narrow_bias = store != Store::plain && out.scalar_type() != ScalarType::Float;

  const auto time = [&](const LtCandidate& candidate) -> double {
    if (run(candidate) != CUBLAS_STATUS_SUCCESS) {
      cudaGetLastError();  // else a later launch would report this failure
      return -1;
    }
    if (narrow_bias && !answers(candidate, -Probe::ROUNDED, Probe::REST)) return -1;  // rounds twice
    if (store == Store::bias_relu && !answers(candidate, NAN, NAN)) return -1;        // loses NaN
    if (!choices.search) return 0;  // the first one that works is taken
    Timer timer(stream);
    for (int i = 0; i < TIMED_RUNS; i++) check(run(candidate), "cublasLtMatmul");
    return timer.stop();
  };

  const LtProblem problem{
      device, static_cast<int64_t>(out.scalar_type()), static_cast<int64_t>(compute), trans_a, trans_b,
      static_cast<int64_t>(store), choices.search, out.size(0), out.size(1), a.size(trans_a ? 0 : 1), leading_dimension(a),
      leading_dimension(b), leading_dimension(out), lt_alignment(a.const_data_ptr()), lt_alignment(b.const_data_ptr()),
      lt_alignment(out.const_data_ptr()) * 512 + lt_alignment(bias)};
  const std::optional<LtCandidate> chosen = lt_fastest.of(problem, candidates, time);
  if (!chosen) return false;
  const int64_t workspace = static_cast<int64_t>(chosen->workspace);
  if (workspace > lt_workspace) lt_workspace = workspace;
  check(run(*chosen), "cublasLtMatmul");
  return true;
}

}  // namespace
