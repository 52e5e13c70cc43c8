// The formula of Adam's update, and its numbers that all elements share. CPU and CUDA compile the same code.
#pragma once
#include "both.hpp"

#include <cmath>

namespace {

struct AdamRule {
  double beta1, beta2, eps, weight_decay;
  bool decoupled;  // torch.optim.AdamW, else torch.optim.Adam
};

// The running mean beta old + (1 - beta) now. For beta >= 1/2 it is computed as old + (1 - beta) (now - old), because
// beta2 = 0.999, rounded to fp32, would make v too large by 1.3e-5 in the long run. The roundings of that form are
// relative to old, so a small beta, which keeps little of old, takes the form now + beta (old - now).
struct Mean {
  float beta, rest;  // rest = 1 - beta

  template <class V>
  MPCOMPARE_BOTH V of(V old, V now) const {
    return beta < 0.5f ? now + beta * (old - now) : old + rest * (now - old);
  }
};

MPCOMPARE_BOTH inline Mean mean(double beta) { return {static_cast<float>(beta), static_cast<float>(1.0 - beta)}; }

// The update of each element, with t the number of the update:
//   g += coupled w      m = first.of(m, g)      v = second.of(v, g^2)
//   w = keep w - size m / (sqrt(v) of_root + eps)
struct AdamStep {
  float coupled, keep;  // weight_decay and 1, or 0 and 1 - lr weight_decay
  Mean first, second;
  float of_root;        // 1 / sqrt(1 - beta2^t)
  float eps;
  float size;  // lr / (1 - beta1^t)
};

MPCOMPARE_BOTH inline AdamStep adam_step(const AdamRule& rule, float lr, float t) {
  AdamStep s;
  s.coupled = rule.decoupled ? 0.0f : static_cast<float>(rule.weight_decay);
  s.keep = rule.decoupled ? static_cast<float>(1.0 - lr * rule.weight_decay) : 1.0f;
  s.first = mean(rule.beta1);
  s.second = mean(rule.beta2);
  s.of_root = static_cast<float>(1.0 / sqrt(1.0 - pow(rule.beta2, static_cast<double>(t))));
  s.eps = static_cast<float>(rule.eps);
  s.size = static_cast<float>(lr / (1.0 - pow(rule.beta1, static_cast<double>(t))));
  return s;
}

}  // namespace
