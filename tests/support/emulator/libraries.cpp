// The functions of the CUDA runtime, cuBLAS, cublasLt and torch that csrc/cuda calls, as their manuals describe and
// their own headers declare them. A call that a manual forbids is an error.
#include "emulator.hpp"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

int emulator_capturing = 0, emulator_unsupported = 0, emulator_processors = 3, emulator_math_mode = CUBLAS_DEFAULT_MATH;
int emulator_losing_nan = 0, emulator_rounding_twice = 0, emulator_searches = 0, emulator_waits = 0, emulator_algorithm = -1;

namespace {

std::string reason;
cudaError_t last_error = cudaSuccess;
double now_ms = 0;

}  // namespace

void emulator::fail(const std::string& why) {
  reason = why;
  last_error = cudaErrorLaunchFailure;
}

// ---- tensor cores

void emulator::mma(const char* where, const char* instruction, float (&d)[4], const uint32_t (&a)[4],
                   const uint32_t (&b)[2]) {
  const bool bf16 = std::strstr(instruction, "bf16") != nullptr;
  const Words* const of = gather(where, 0xffffffffu, {a[0], a[1], a[2], a[3], b[0], b[1]});
  const auto element = [&](int lane, int word, int half) {
    const auto bits = static_cast<unsigned short>(of[lane][word] >> 16 * half);
    return bf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
  };
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  for (int e = 0; e < 4; e++) {
    const int n = 2 * t + e % 2;
    for (int k = 0; k < 16; k++)
      d[e] += element(4 * g + k % 8 / 2, e / 2 + 2 * (k / 8), k % 2) * element(4 * n + k % 8 / 2, 4 + k / 8, k % 2);
  }
}

// ---- torch

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = emulator::STREAM;
  return 0;
}

AOTITorchError torch_get_current_cuda_blas_handle(void** handle) {
  *handle = &emulator_math_mode;
  return 0;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(1);
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }

AOTITorchError torch_c10_cuda_check_msg(int32_t code, const char* file, const char*, uint32_t line, bool,
                                        char** message) {
  if (code == cudaSuccess) return 0;
  const std::string where = std::string(file) + ":" + std::to_string(line);
  *message = strdup(("CUDA error " + std::to_string(code) + " at " + where + ": " + reason).c_str());
  reason.clear();
  return 0;
}
void torch_c10_cuda_free_error_msg(char* message) { free(message); }

// ---- the CUDA runtime; an event is the time at which it was recorded

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = emulator_processors;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (stream != emulator::STREAM) return cudaErrorInvalidValue;
  *status = emulator_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* x, int value, size_t bytes, cudaStream_t stream) {
  if (stream != emulator::STREAM) return cudaErrorInvalidValue;
  std::memset(x, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (stream != emulator::STREAM) return cudaErrorInvalidValue;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new double(-1));
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream != emulator::STREAM) return cudaErrorInvalidValue;
  *reinterpret_cast<double*>(event) = now_ms;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream != emulator::STREAM) return cudaErrorInvalidValue;
  emulator_waits += 1;
  return emulator_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaStreamSynchronize(emulator::STREAM); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const double from = *reinterpret_cast<double*>(begin), to = *reinterpret_cast<double*>(end);
  if (from < 0 || to < 0) return cudaErrorInvalidValue;
  *ms = static_cast<float>(to - from);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}

// ---- products, column-major:  D = alpha op(A) op(B) + beta C

namespace {

struct Matrix {
  cudaDataType_t type;
  int64_t rows, columns, ld;
  bool valid() const { return rows > 0 && columns > 0 && ld >= rows; }
};

float read(const Matrix& x, const void* data, int64_t i, int64_t j) {
  const int64_t at = i + j * x.ld;
  if (x.type == CUDA_R_16F) return __half2float(static_cast<const __half*>(data)[at]);
  if (x.type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
  return static_cast<const float*>(data)[at];
}

void write(const Matrix& x, void* data, int64_t i, int64_t j, float value) {
  const int64_t at = i + j * x.ld;
  if (x.type == CUDA_R_16F)
    static_cast<__half*>(data)[at] = __float2half_rn(value);
  else if (x.type == CUDA_R_16BF)
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
  else
    static_cast<float*>(data)[at] = value;
}

// Rounds to 10 bits of mantissa, to nearest even.
float to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

float to_fp16(float x) { return __half2float(__float2half_rn(x)); }

struct Problem {
  cublasComputeType_t compute;
  bool transpose_a, transpose_b;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  Matrix A, B, C, D;

  bool valid() const {
    const int64_t k = transpose_a ? A.rows : A.columns;
    return A.valid() && B.valid() && C.valid() && D.valid() && (transpose_a ? A.columns : A.rows) == D.rows &&
           (transpose_b ? B.columns : B.rows) == k && (transpose_b ? B.rows : B.columns) == D.columns &&
           C.rows == D.rows && C.columns == D.columns;
  }

  // The tables "Supported types" of cublasGemmEx and cublasLtMatmul.
  bool supported() const {
    const bool wide = D.type == CUDA_R_32F, same = D.type == A.type;
    if (A.type != B.type || C.type != D.type) return false;
    if (compute == CUBLAS_COMPUTE_16F) return A.type == CUDA_R_16F && same;
    if (compute == CUBLAS_COMPUTE_32F_FAST_TF32) return A.type == CUDA_R_32F && wide;
    return compute == CUBLAS_COMPUTE_32F && (wide || same);
  }
};

// The sum over k in `parts` pieces, added in fp32, or in fp16 for COMPUTE_16F.
void multiply(const Problem& p, const void* a, const void* b, const void* c, void* d, float alpha, float beta,
              bool tf32, const void* bias = nullptr, int parts = 1, bool losing_nan = false,
              bool rounding_twice = false) {
  const int64_t m = p.D.rows, n = p.D.columns, k = p.transpose_a ? p.A.rows : p.A.columns;
  const bool fp16 = p.compute == CUBLAS_COMPUTE_16F;
  tf32 = (tf32 || p.compute == CUBLAS_COMPUTE_32F_FAST_TF32) && p.A.type == CUDA_R_32F;
  const auto operand = [&](float x) { return tf32 && std::isfinite(x) ? to_tf32(x) : x; };
  std::vector<float> of_a(m * k), sums(m), part(m);  // op(A), a column after the other
  for (int64_t q = 0; q < k; q++)
    for (int64_t i = 0; i < m; i++) of_a[q * m + i] = operand(p.transpose_a ? read(p.A, a, q, i) : read(p.A, a, i, q));
  for (int64_t j = 0; j < n; j++) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int s = 0; s < parts; s++) {
      std::fill(part.begin(), part.end(), 0.0f);
      for (int64_t q = k * s / parts; q < k * (s + 1) / parts; q++) {
        const float of_b = operand(p.transpose_b ? read(p.B, b, j, q) : read(p.B, b, q, j));
        const float* column = &of_a[q * m];
        if (fp16)
          for (int64_t i = 0; i < m; i++) part[i] = to_fp16(part[i] + to_fp16(column[i] * of_b));
        else
          for (int64_t i = 0; i < m; i++) part[i] += column[i] * of_b;
      }
      for (int64_t i = 0; i < m; i++) sums[i] += part[i];
    }
    for (int64_t i = 0; i < m; i++) {
      float value = alpha * sums[i];
      if (beta != 0) value += beta * read(p.C, c, i, j);  // else C is not read
      if (rounding_twice && p.epilogue & CUBLASLT_EPILOGUE_BIAS) {
        write(p.D, d, i, j, value);
        value = read(p.D, d, i, j);
      }
      if (p.epilogue & CUBLASLT_EPILOGUE_BIAS) value += read({p.D.type, m, 1, m}, bias, i, 0);
      if (p.epilogue & CUBLASLT_EPILOGUE_RELU && (value < 0 || (losing_nan && std::isnan(value)))) value = 0;
      write(p.D, d, i, j, value);
    }
  }
}

}  // namespace

// ---- cuBLAS

const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_INVALID_VALUE   ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                                 : "another status";
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = static_cast<cublasMath_t>(*reinterpret_cast<int*>(handle));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  *reinterpret_cast<int*>(handle) = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void* alpha, const void* a, cudaDataType a_type, int lda, const void* b,
                            cudaDataType b_type, int ldb, const void* beta, void* c, cudaDataType c_type, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t) {
  const bool ta = transa != CUBLAS_OP_N, tb = transb != CUBLAS_OP_N;
  const Matrix C{c_type, m, n, ldc};
  const Problem p{compute, ta, tb, CUBLASLT_EPILOGUE_DEFAULT, {a_type, ta ? k : m, ta ? m : k, lda},
                  {b_type, tb ? n : k, tb ? k : n, ldb}, C, C};
  if (!p.valid()) return CUBLAS_STATUS_INVALID_VALUE;
  if (!p.supported()) return CUBLAS_STATUS_NOT_SUPPORTED;
  const int mode = *reinterpret_cast<int*>(handle);
  if (!(mode & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)) return CUBLAS_STATUS_NOT_SUPPORTED;  // here
  const auto scalar = [&](const void* x) {
    return compute == CUBLAS_COMPUTE_16F ? __half2float(*static_cast<const __half*>(x)) : *static_cast<const float*>(x);
  };
  multiply(p, a, b, c, c, scalar(alpha), scalar(beta), (mode & 0xf) == CUBLAS_TF32_TENSOR_OP_MATH);
  return CUBLAS_STATUS_SUCCESS;
}

// ---- cublasLt

namespace {

struct Description {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

// The product for which an algorithm is chosen, as its cublasLtMatmulAlgo_t says.
struct Algorithm {
  uint64_t index, problem;
  uint32_t alignment[4], of_bias;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

// The first fails when it is run, the third is the fastest and needs memory, the last has a state that forbids it.
struct Kind {
  double ms;
  uint64_t workspace;
  int parts;
};
constexpr Kind KINDS[] = {{0.5, 0, 0}, {3, 0, 1}, {1, 4096, 2}, {2, 256, 1}, {0.1, 0, 1}};

Problem problem_of(const Description& x, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                   cublasLtMatrixLayout_t d) {
  const auto matrix = [](cublasLtMatrixLayout_t layout) { return *reinterpret_cast<Matrix*>(layout); };
  return {x.compute,  x.transpose_a != CUBLAS_OP_N, x.transpose_b != CUBLAS_OP_N, x.epilogue, matrix(a), matrix(b),
          matrix(c), matrix(d)};
}

uint64_t hash(const Problem& p) {
  uint64_t h = 1469598103934665603u;
  const auto add = [&](uint64_t x) { h = (h ^ x) * 1099511628211u; };
  for (const uint64_t x : {static_cast<uint64_t>(p.compute), uint64_t{p.transpose_a}, uint64_t{p.transpose_b},
                           uint64_t{p.epilogue}})
    add(x);
  for (const Matrix& x : {p.A, p.B, p.C, p.D})
    for (const int64_t y : {static_cast<int64_t>(x.type), x.rows, x.columns, x.ld}) add(static_cast<uint64_t>(y));
  return h;
}

bool aligned(const void* x, uint64_t bytes) { return reinterpret_cast<uintptr_t>(x) % bytes == 0; }

template <class T>
cublasStatus_t assign(T& value, const void* buffer, size_t bytes) {
  if (bytes != sizeof value) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&value, buffer, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(8);
  return emulator_capturing ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  const Matrix x{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld};
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Matrix(x));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<Matrix*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new Description{compute, scale});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete reinterpret_cast<Description*>(desc);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name,
                                              const void* buffer, size_t bytes) {
  Description& x = *reinterpret_cast<Description*>(desc);
  switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(x.transpose_a, buffer, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(x.transpose_b, buffer, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(x.epilogue, buffer, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(x.bias, buffer, bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<Preference*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t name, const void* buffer,
                                                    size_t bytes) {
  Preference& x = *reinterpret_cast<Preference*>(preference);
  switch (name) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return assign(x.workspace, buffer, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return assign(x.reductions, buffer, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return assign(x.alignment[0], buffer, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return assign(x.alignment[1], buffer, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return assign(x.alignment[2], buffer, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return assign(x.alignment[3], buffer, bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t results[], int* found) {
  emulator_searches += 1;
  const Description& description = *reinterpret_cast<Description*>(desc);
  const Preference& wanted = *reinterpret_cast<Preference*>(preference);
  const Problem p = problem_of(description, a, b, c, d);
  *found = 0;
  if (!p.valid() || description.scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
  if (emulator_unsupported || !p.supported()) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (wanted.reductions & ~CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) return CUBLAS_STATUS_INVALID_VALUE;  // not fp32
  uint32_t of_bias = 256;
  while (!aligned(description.bias, of_bias)) of_bias /= 2;
  for (uint64_t index = 0; index < std::size(KINDS) && *found < requested; index++) {
    if (KINDS[index].workspace > wanted.workspace) continue;
    Algorithm chosen{index, hash(p), {}, of_bias};
    std::copy(std::begin(wanted.alignment), std::end(wanted.alignment), chosen.alignment);
    cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
    std::memcpy(&result.algo, &chosen, sizeof chosen);
    result.workspaceSize = KINDS[index].workspace;
    result.state = index + 1 < std::size(KINDS) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                              const void* beta, const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  const Description& description = *reinterpret_cast<Description*>(desc);
  const Problem p = problem_of(description, layout_a, layout_b, layout_c, layout_d);
  Algorithm chosen;
  std::memcpy(&chosen, algorithm, sizeof chosen);
  if (chosen.problem != hash(p) || stream != emulator::STREAM) return CUBLAS_STATUS_INVALID_VALUE;
  const void* const pointers[] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    if (!aligned(pointers[i], chosen.alignment[i])) return CUBLAS_STATUS_INVALID_VALUE;
  const Kind& kind = KINDS[chosen.index];
  if (!aligned(description.bias, chosen.of_bias) || workspace_bytes < kind.workspace || !aligned(workspace, 16))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (kind.workspace > 0) std::memset(workspace, 0x55, kind.workspace);
  if (kind.parts == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.epilogue & CUBLASLT_EPILOGUE_BIAS && description.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  emulator_algorithm = static_cast<int>(chosen.index);
  now_ms += kind.ms;
  const auto does = [&](int which) { return which == 2 || (which == 1 && chosen.index == 2); };
  multiply(p, a, b, c, d, *static_cast<const float*>(alpha), *static_cast<const float*>(beta), false, description.bias,
           kind.parts, does(emulator_losing_nan), does(emulator_rounding_twice));
  return CUBLAS_STATUS_SUCCESS;
}
