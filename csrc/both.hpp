// Marks what is compiled for a GPU too, where nvcc compiles it.
#pragma once

#ifdef __CUDACC__
#define MPCOMPARE_BOTH __host__ __device__
#else
#define MPCOMPARE_BOTH
#endif
