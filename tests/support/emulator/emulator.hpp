// What the emulator's parts share, and the switches that tests set.
#pragma once
#include <cuda_runtime.h>

#include <string>

#pragma GCC visibility push(default)
extern "C" {
extern int emulator_backwards;    // blocks and threads run last to first: a race shows as another result
extern int emulator_capturing;    // a graph is being captured: nothing may wait
extern int emulator_unsupported;  // cublasLt has no algorithm for anything
extern int emulator_losing_nan;   // in relu: 1 the fastest algorithm of cublasLt, 2 all
extern int emulator_processors;   // of the GPU
extern int emulator_math_mode;    // of torch's cuBLAS handle
extern int emulator_searches;     // so far
extern int emulator_waits;        // of the host for the GPU, so far
extern int emulator_algorithm;    // of cublasLt, the last that ran
}
#pragma GCC visibility pop

namespace emulator {

inline const cudaStream_t STREAM = reinterpret_cast<cudaStream_t>(8);  // torch's current one
void fail(const std::string& why);                                     // for cudaGetLastError

}  // namespace emulator
