// A search that keeps its results. The candidates for a problem are timed when the problem is met for the first time;
// after that the fastest one is returned at once. This file knows nothing of CUDA, so it is tested without a GPU.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

namespace {

// Problem is any type that has an order, Candidate the type of the things to choose from.
template <class Problem, class Candidate>
class Fastest {
 public:
  // Returns the fastest candidate for this problem, or nothing if no candidate works. For a new problem candidates()
  // lists the candidates, the likely best first, and time(candidate) tries one. It returns the time that the candidate
  // took, 0 if the candidate is to be taken at once, or a negative number if it does not work. A later candidate must
  // be faster by more than the noise. Exceptions of both functions pass through, and then nothing is kept.
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

  // Returns the number of problems for which no candidate works.
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
