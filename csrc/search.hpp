// A search whose result is kept: the first time that a problem is met its candidates are tried, and later the fastest
// one is taken at once. Knows nothing of CUDA, so that it is tested without.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

namespace {

// Problem: anything that can be ordered. Candidate: what is chosen.
template <class Problem, class Candidate>
class Fastest {
 public:
  // The candidate for this problem; none if none works. Where it is not known yet, candidates() lists them, the likely
  // best first, and time(candidate) tries one: what it took, 0 if it is to be taken at once, less than 0 if it does not
  // work. A later one must be faster by more than the noise. Throws what they throw, and then keeps nothing.
  template <class List, class Time>
  std::optional<Candidate> of(const Problem& problem, List candidates, Time time) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = chosen_.find(problem);
    if (known != chosen_.end()) return known->second;
    std::optional<Candidate> best;
    double shortest = std::numeric_limits<double>::infinity();
    for (const Candidate& candidate : candidates()) {
      const double t = time(candidate);
      if (t < 0 || t >= (1 - NOISE) * shortest) continue;
      best = candidate;
      shortest = t;
      if (t == 0) break;
    }
    return chosen_.emplace(problem, best).first->second;
  }

  // Problems for which no candidate works.
  int64_t unsolved() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(chosen_.begin(), chosen_.end(), [](const auto& known) { return !known.second; });
  }

 private:
  static constexpr double NOISE = 0.03;
  std::mutex mutex_;
  std::map<Problem, std::optional<Candidate>> chosen_;
};

}  // namespace
