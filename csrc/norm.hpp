// The maximum of infinity norms. CPU and CUDA compile the same code.
#pragma once
#include "both.hpp"

namespace {

// Returns the larger number, or NaN if either is NaN.
MPCOMPARE_BOTH inline double larger(double a, double b) { return a >= b || a != a ? a : b; }

}  // namespace
