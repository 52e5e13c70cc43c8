// What norms share on every device.
#pragma once
#include "both.hpp"

namespace {

// The larger one; NaN where either is.
MPCOMPARE_BOTH inline double larger(double a, double b) { return a >= b || a != a ? a : b; }

}  // namespace
