// torch::stable::new_empty, for the emulated operators.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>

namespace emulator {

// As aligned as torch's memory on a GPU is, to 512 bytes, and all ones, which is NaN in every dtype: what nobody wrote
// shows.
inline torch::stable::Tensor new_empty(const torch::stable::Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef size,
                                       std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
  int64_t count = 1;
  for (const int64_t n : size) count *= n;
  torch::stable::Tensor memory = torch::stable::new_empty(like, {count + 512}, dtype);
  const int64_t element = static_cast<int64_t>(memory.element_size());
  std::memset(memory.mutable_data_ptr(), 0xff, (count + 512) * element);
  const int64_t beyond = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 512);
  return torch::stable::view(torch::stable::narrow(memory, 0, (512 - beyond) / element, count), size);
}

}  // namespace emulator
