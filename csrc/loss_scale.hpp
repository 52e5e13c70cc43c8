// The update of the dynamic loss scale: DynamicLossScale.update of mpcompare/loss_scale.py. It does what
// torch.amp.GradScaler does, with a floor and a hysteresis. CPU and CUDA compile the same code.
#pragma once
#include "both.hpp"

#include <cstdint>

namespace {

struct ScaleRule {
  double growth_factor, backoff_factor;
  int64_t growth_interval;
  float min_scale;
  int64_t hysteresis;
};

MPCOMPARE_BOTH inline void next_scale(float* scale, int32_t* growth_tracker, int32_t* overflows_left, bool found_inf,
                                      const ScaleRule& rule) {
  if (found_inf) {
    *growth_tracker = 0;
    if (*overflows_left > 0) *overflows_left -= 1;
    if (*overflows_left > 0) return;
    const float smaller = static_cast<float>(*scale * rule.backoff_factor);
    *scale = smaller > rule.min_scale ? smaller : rule.min_scale;
    return;
  }
  *growth_tracker += 1;
  if (*growth_tracker != rule.growth_interval) return;
  *growth_tracker = 0;
  *overflows_left = static_cast<int32_t>(rule.hysteresis);
  const float larger = static_cast<float>(*scale * rule.growth_factor);
  if (larger - larger == 0) *scale = larger;  // if finite; otherwise fp32 has no larger scale, and the old one stays
}

}  // namespace
