// The blocking of a product, which a micro-kernel chooses for the loops of multiply.hpp.
#pragma once
#include <cstdint>

namespace {

struct Blocking {
  int64_t thin, wide;      // the largest block of C that a thread owns, in rows of the thin and of the wide operand
  int64_t lanes;           // lanes along K that are packed at a time
  int64_t thin_at_a_time;  // rows of the thin operand that are packed at a time
  int64_t wide_panels;     // wide panels that stay in a cache while the thin panels pass
};

}  // namespace
