// How a product is cut: what a micro-kernel tells the loops of multiply.hpp.
#pragma once
#include <cstdint>

namespace {

struct Blocking {
  int64_t thin, wide;      // the largest block of C that a thread owns, in rows of the thin and of the wide operand
  int64_t lanes;           // of K that are packed at a time
  int64_t thin_at_a_time;  // rows of the thin operand that are packed at a time
  int64_t wide_panels;     // that stay in a cache while the thin ones pass
};

}  // namespace
