// MPCOMPARE_BOTH marks functions that nvcc compiles for host and GPU; other compilers ignore it.
#pragma once

#ifdef __CUDACC__
#define MPCOMPARE_BOTH __host__ __device__
#else
#define MPCOMPARE_BOTH
#endif
