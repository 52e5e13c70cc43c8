// The peak of the CPU, for bench_ops.py: prints GFLOP/s of fp32 multiply-add and of the bf16 dot product (0 if the CPU
// has none). The first argument is the number of threads.
#include "../csrc/cpu/vector.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int CHAINS = 14;  // independent sums: more than latency x throughput of the multiply-add

template <class Step>
double gflops(int threads, double flops_per_step, const Step& step) {
  constexpr long STEPS = 30'000'000;
  double best = 0;
  for (int repeat = 0; repeat < 5; repeat++) {
    float used = 0;
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : used)
    {
      vec acc[CHAINS];
      for (int i = 0; i < CHAINS; i++) acc[i] = vec{} + i * 1e-3f;
      for (long n = 0; n < STEPS; n++) {
#pragma GCC unroll 14
        for (int i = 0; i < CHAINS; i++) acc[i] = step(acc[i]);
      }
      for (int i = 0; i < CHAINS; i++) used += sum(acc[i]);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (used != 12345.0f) best = std::max(best, threads * STEPS * CHAINS * flops_per_step / seconds.count() * 1e-9);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const vec x = vec{} + 0.999f, y = vec{} + 1e-3f;
  const uvec half = uvec{} + 0x3c003c00u;
  std::printf("%.1f\n", gflops(threads, 2.0 * VL, [&](vec a) { return a * x + y; }));
  std::printf("%.1f\n", HAS_BF16_DOT ? gflops(threads, 4.0 * VL, [&](vec a) { return dot2(a, half, half); }) : 0.0);
}
