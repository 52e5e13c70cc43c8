// NVIDIA's header of this name for the CPU: the parts of nvcc that a kernel and its launch need, for a C++ compiler.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __launch_bounds__(...)
#define EMULATOR_TEXT(x) #x
#define EMULATOR_LINE(line) __FILE__ ":" EMULATOR_TEXT(line)
#define __syncthreads() emulator::barrier(EMULATOR_LINE(__LINE__))
#define __shfl_xor_sync(mask, value, lanes) emulator::shuffle_xor(EMULATOR_LINE(__LINE__), mask, value, lanes)

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulator {

// Waits for all threads of the block, which must come to the same line.
void barrier(const char* where);

// Waits for all 32 threads of the warp, likewise. Returns what each of them gave, until the warp waits again.
using Words = std::array<uint32_t, 6>;
const Words* gather(const char* where, uint32_t mask, const Words& mine);

// d = a b + d over the warp, where the instruction says fp16 or bf16; the layouts are in csrc/cuda/mma.hpp.
void mma(const char* where, const char* instruction, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// Each thread gets the value of lane (its own xor lanes).
inline float shuffle_xor(const char* where, uint32_t mask, float value, int lanes) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = gather(where, mask, {bits})[threadIdx.x % 32 ^ lanes][0];
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// kernel<<<grid, block, dynamic_shared, stream>>>(arguments) is written Launch(kernel, {...})(arguments).
struct Configuration {
  dim3 grid, block;
  size_t dynamic_shared;
  cudaStream_t stream;
};
// Runs one block after the other. An act that CUDA forbids ends the launch, and cudaGetLastError says so.
void run(const Configuration& how, const std::function<void()>& thread);

template <class... P>
struct Launch {
  void (*kernel)(P...);
  Configuration how;
  Launch(void (*kernel)(P...), const Configuration& how) : kernel(kernel), how(how) {}
  void operator()(P... arguments) const {  // of the kernel's own types
    run(how, [&] { kernel(arguments...); });
  }
};

// A __shared__ variable. No block may rely on what another one left: the memory is all ones, NaN, when a block begins.
struct SharedMemory {
  SharedMemory(void* begin, size_t bytes);
};
template <class T>
struct Shared {
  T value;
  SharedMemory known{&value, sizeof value};
};

}  // namespace emulator

template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(P...), int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
