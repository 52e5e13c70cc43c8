// What all elements of a step of Adam share, the same code for every device.
#pragma once
#include "both.hpp"

#include <cmath>

namespace {

struct AdamRule {
  double beta1, beta2, eps, weight_decay;
  bool decoupled;  // torch.optim.AdamW, else torch.optim.Adam
};

// For each element, with t the number of this step:
//   g += coupled w      m += first (g - m)      v += second (g^2 - v)
//   w = keep w - size m / (sqrt(v) of_root + eps)
// m = beta1 m + (1 - beta1) g in this form: beta2 = 0.999, rounded to fp32, would make v too large by 1.3e-5 in the end.
struct AdamStep {
  float coupled, keep;  // weight_decay and 1, or 0 and 1 - lr weight_decay
  float first, second;  // 1 - beta
  float of_root;        // 1 / sqrt(1 - beta2^t)
  float eps;
  float size;  // lr / (1 - beta1^t)
};

MPCOMPARE_BOTH inline AdamStep adam_step(const AdamRule& rule, float lr, float t) {
  AdamStep s;
  s.coupled = rule.decoupled ? 0.0f : static_cast<float>(rule.weight_decay);
  s.keep = rule.decoupled ? static_cast<float>(1.0 - lr * rule.weight_decay) : 1.0f;
  s.first = static_cast<float>(1.0 - rule.beta1);
  s.second = static_cast<float>(1.0 - rule.beta2);
  s.of_root = static_cast<float>(1.0 / sqrt(1.0 - pow(rule.beta2, static_cast<double>(t))));
  s.eps = static_cast<float>(rule.eps);
  s.size = static_cast<float>(lr / (1.0 - pow(rule.beta1, static_cast<double>(t))));
  return s;
}

}  // namespace
