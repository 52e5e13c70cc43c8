// The declarations that the emulator's parts share, and the switches that tests set.
#pragma once
#include <cuda_runtime.h>

#include <string>

#pragma GCC visibility push(default)
extern "C" {
extern int emulator_backwards;    // blocks and threads run last to first: a race shows as another result
extern int emulator_capturing;    // a graph is being captured: nothing may wait
extern int emulator_unsupported;  // cublasLt has no algorithm for anything
extern int emulator_losing_nan;   // algorithms of cublasLt that lose NaN in relu: 1 the fastest, 2 all
extern int emulator_rounding_twice;  // algorithms that round a product before they add the bias: likewise
extern int emulator_processors;   // multiprocessors of the GPU
extern int emulator_math_mode;    // the math mode of torch's cuBLAS handle
extern int emulator_searches;     // searches for algorithms so far
extern int emulator_waits;        // waits of the host for the GPU so far
extern int emulator_algorithm;    // the algorithm of cublasLt that ran last
}
#pragma GCC visibility pop

namespace emulator {

inline const cudaStream_t STREAM = reinterpret_cast<cudaStream_t>(8);  // torch's current one
void fail(const std::string& why);                                     // cudaGetLastError tells the reason

}  // namespace emulator
