// The contracts of the operators around gemm, checked once for every device.
//
// T, the compute dtype, is fp32, fp16 or bf16. Matrices are row-major, and their rows may be further apart than their
// length (see gemm.hpp); all other arguments, and y, are contiguous. Arithmetic and sums are fp32 or better, and every
// result is rounded once. No argument may be empty, and no output may overlap another argument. The values that a step
// decides (lr, step, loss_scale, found_inf, clip: fp32 scalars) lie on the device; a host that reads one waits.
//
// linear           x [n, in] T, w [in, out] T, bias [out] T -> out [n, out] T or fp32
//                    out = x w + bias, or relu(x w + bias)
//
// weight_grad      z [n, in] T, da [n, out] T -> dw [in, out] T
//                    dw = z^T da
//
// linear_backward  da [n, out] T, w [in, out] T, z [n, in] T in place -> dw [in, out] T, dbias [in] T
//                    dw = z^T da of the old z      z_ij = z_ij <= 0 ? 0 : (da w^T)_ij
//                    dbias_j = sum_i z_ij of the new, rounded z
//                    The gradient passes where z is NaN, as in torch.
//
// cross_entropy    logits [n, c] T or fp32, y [n] int64, loss_scale -> dlogits [n, c] T, dbias [c] T, loss [] fp32
//                    loss = mean_i(log sum_j exp(logits_ij) - logits_i,y_i)
//                    dlogits = (softmax(logits) - onehot(y)) loss_scale / n, rounded      dbias_j = sum_i dlogits_ij
//                    A label outside [0, c) is an error on a CPU, before anything is written. A GPU cannot raise one
//                    without a host sync, so there the loss and the gradient of that row are NaN.
//
// mse              output [n, c] T or fp32, y [n, c] fp32, loss_scale -> doutput [n, c] T, dbias [c] T, loss [] fp32
//                    loss = mean_ij (output - y)^2      doutput = 2 (output - y) loss_scale / (n c)      dbias as above
//
// non_finite       x T of any shape -> found_inf = 1 if x holds inf or NaN; otherwise found_inf stays as it is
//
// grad_norm        x T of any shape, loss_scale -> found_inf as in non_finite; norm, an fp64 scalar
//                    norm += sum_i (x_i / loss_scale)^2, or with infinity norm = max(norm, max_i |x_i / loss_scale|)
//                    Squares and sums are fp64. The maximum of NaN and any number is NaN. Calls for all gradients of a
//                    step, from norm = 0 on, yield the square of torch.nn.utils.get_total_norm, or with infinity that
//                    norm itself.
//
// sgd              master fp32, velocity fp32 or none, params T or none, grad T, lr, loss_scale, found_inf, clip or none;
//                  master, velocity, params and grad have any shape and equally many elements; params may be grad
//                    unless found_inf:  g = clip grad / loss_scale + weight_decay master
//                                       v = momentum v + g      d = nesterov ? g + momentum v : v
//                                       master = master - lr d
//                    in any case        params = master, rounded
//                    Without velocity d = g, and momentum must be 0. The division is by 1 / loss_scale, rounded to
//                    fp32, as in torch.amp.GradScaler.
//
// adam             as sgd, with exp_avg (m) and exp_avg_sq (v) fp32 in place of velocity, and with step, the number
//                  of updates, this one included
//                    unless found_inf:  g = clip grad / loss_scale, + weight_decay master unless decoupled
//                                       m = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2
//                                       master = master (1 - lr weight_decay) if decoupled
//                                       master -= lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
//                    in any case        params = master, rounded
//                    The numbers that all elements share are computed in fp64 and rounded once: see adam.hpp.
//
// update_scale     loss_scale in place, growth_tracker and overflows_left int32 scalars in place, found_inf
//                    DynamicLossScale.update of mpcompare/loss_scale.py
#pragma once
#include "gemm.hpp"

#include <optional>
#include <vector>

namespace {

struct Argument {
  const char* name;
  const Tensor& tensor;
};
using Arguments = std::vector<Argument>;

struct LossShape {
  int64_t n, c;
  int64_t ld, ldg;  // elements from one row to the next in the output and in its gradient
};

template <class T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}
template <class T>
T* mutable_data(const std::optional<Tensor>& x) {
  return x ? mutable_data<T>(*x) : nullptr;
}

inline void check_matrix(const char* op, Argument x) {
  const Tensor& t = x.tensor;
  STD_TORCH_CHECK(t.dim() == 2, op, ": ", x.name, " must be a matrix, got ", t.dim(), " dimensions");
  STD_TORCH_CHECK(t.size(0) > 0 && t.size(1) > 0, op, ": ", x.name, " is empty: ", t.size(0), " x ", t.size(1));
  STD_TORCH_CHECK(is_row_major(t), op, ": ", x.name, " has strides (", t.stride(0), ", ", t.stride(1),
                  "); rows must be contiguous");
}

inline void check_contiguous(const char* op, Argument x) {
  STD_TORCH_CHECK(x.tensor.is_contiguous(), op, ": ", x.name, " must be contiguous");
}

inline void check_size(const char* op, Argument x, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(x.tensor.size(0) == rows && x.tensor.size(1) == columns, op, ": ", x.name, " is ", x.tensor.size(0),
                  " x ", x.tensor.size(1), ", expected ", rows, " x ", columns);
}

inline void check_vector(const char* op, Argument x, int64_t length) {
  STD_TORCH_CHECK(x.tensor.dim() == 1 && x.tensor.size(0) == length, op, ": ", x.name, " must be a vector of ", length);
  check_contiguous(op, x);
}

inline void check_compute_dtype(const char* op, Argument x) {
  const ScalarType dtype = x.tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, op, ": ",
                  x.name, " must be fp32, fp16 or bf16");
}

inline void check_same_dtype(const char* op, Argument x, Argument like) {
  STD_TORCH_CHECK(x.tensor.scalar_type() == like.tensor.scalar_type(), op, ": ", x.name, " must have the dtype of ",
                  like.name);
}

inline void check_same_dtype_or_fp32(const char* op, Argument x, Argument like) {
  const ScalarType dtype = x.tensor.scalar_type();
  STD_TORCH_CHECK(dtype == like.tensor.scalar_type() || dtype == ScalarType::Float, op, ": ", x.name,
                  " must have the dtype of ", like.name, ", or fp32");
}

inline void check_fp32(const char* op, Argument x) {
  STD_TORCH_CHECK(x.tensor.scalar_type() == ScalarType::Float, op, ": ", x.name, " must be fp32");
}

inline void check_apart(const char* op, Argument x, Argument y) {
  STD_TORCH_CHECK(!overlap(x.tensor, y.tensor), op, ": ", x.name, " must not overlap ", y.name);
}

// Checks that all tensors are on one device and that no argument overlaps a written one.
inline void check_memory(const char* op, const Arguments& written, const Arguments& read) {
  const Argument& first = written.front();
  for (const Arguments* list : {&written, &read})
    for (const Argument& x : *list)
      STD_TORCH_CHECK(x.tensor.is_cpu() == first.tensor.is_cpu() &&
                          x.tensor.get_device_index() == first.tensor.get_device_index(),
                      op, ": ", x.name, " must be on the device of ", first.name);
  for (size_t i = 0; i < written.size(); i++) {
    for (size_t j = i + 1; j < written.size(); j++) check_apart(op, written[j], written[i]);
    for (const Argument& x : read) check_apart(op, written[i], x);
  }
}

// Returns the shape of the product x w.
inline GemmShape check_linear(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& out) {
  const char* op = "linear";
  for (const Argument& m : Arguments{{"x", x}, {"w", w}, {"out", out}}) check_matrix(op, m);
  STD_TORCH_CHECK(x.size(1) == w.size(0), op, ": x has ", x.size(1), " columns, w has ", w.size(0), " rows");
  const int64_t M = x.size(0), N = w.size(1), K = x.size(1);
  check_size(op, {"out", out}, M, N);
  check_vector(op, {"bias", bias}, N);
  check_compute_dtype(op, {"x", x});
  check_same_dtype(op, {"w", w}, {"x", x});
  check_same_dtype(op, {"bias", bias}, {"x", x});
  check_same_dtype_or_fp32(op, {"out", out}, {"x", x});
  check_memory(op, {{"out", out}}, {{"x", x}, {"w", w}, {"bias", bias}});
  return {M, N, K, leading_dimension(x), leading_dimension(w), leading_dimension(out)};
}

// Returns the shape of the product z^T da.
inline GemmShape check_weight_grad(const Tensor& z, const Tensor& da, const Tensor& dw) {
  const char* op = "weight_grad";
  for (const Argument& m : Arguments{{"z", z}, {"da", da}, {"dw", dw}}) check_matrix(op, m);
  STD_TORCH_CHECK(z.size(0) == da.size(0), op, ": z has ", z.size(0), " rows, da has ", da.size(0));
  const int64_t M = z.size(1), N = da.size(1), K = z.size(0);
  check_size(op, {"dw", dw}, M, N);
  check_compute_dtype(op, {"z", z});
  for (const Argument& x : Arguments{{"da", da}, {"dw", dw}}) check_same_dtype(op, x, {"z", z});
  check_memory(op, {{"dw", dw}}, {{"z", z}, {"da", da}});
  return {M, N, K, leading_dimension(z), leading_dimension(da), leading_dimension(dw)};
}

// Returns the shape of the product da w^T.
inline GemmShape check_linear_backward(const Tensor& da, const Tensor& w, const Tensor& z, const Tensor& dw,
                                       const Tensor& dbias) {
  const char* op = "linear_backward";
  for (const Argument& m : Arguments{{"da", da}, {"w", w}, {"z", z}, {"dw", dw}}) check_matrix(op, m);
  STD_TORCH_CHECK(da.size(1) == w.size(1), op, ": da has ", da.size(1), " columns, w has ", w.size(1));
  const int64_t M = da.size(0), N = w.size(0), K = da.size(1);
  check_size(op, {"z", z}, M, N);
  check_size(op, {"dw", dw}, N, K);
  check_vector(op, {"dbias", dbias}, N);
  check_compute_dtype(op, {"da", da});
  for (const Argument& x : Arguments{{"w", w}, {"z", z}, {"dw", dw}, {"dbias", dbias}})
    check_same_dtype(op, x, {"da", da});
  check_memory(op, {{"z", z}, {"dw", dw}, {"dbias", dbias}}, {{"da", da}, {"w", w}});
  return {M, N, K, leading_dimension(da), leading_dimension(w), leading_dimension(z)};
}

inline void check_fp32_scalar(const char* op, Argument x) {
  STD_TORCH_CHECK(x.tensor.dim() == 0 && x.tensor.scalar_type() == ScalarType::Float, op, ": ", x.name,
                  " must be an fp32 scalar");
}

// Checks the arguments that cross_entropy and mse share: output and its gradient, column sums, scalar loss. The caller
// checks the shape of y.
inline LossShape check_loss(const char* op, Argument output, Argument gradient, const Tensor& dbias, const Tensor& loss,
                            const Tensor& y, const Tensor& loss_scale) {
  for (const Argument& m : {output, gradient}) check_matrix(op, m);
  const LossShape s{output.tensor.size(0), output.tensor.size(1), leading_dimension(output.tensor),
                    leading_dimension(gradient.tensor)};
  check_size(op, gradient, s.n, s.c);
  check_vector(op, {"dbias", dbias}, s.c);
  check_compute_dtype(op, gradient);
  check_same_dtype(op, {"dbias", dbias}, gradient);
  check_same_dtype_or_fp32(op, output, gradient);
  for (const Argument& x : Arguments{{"loss", loss}, {"loss_scale", loss_scale}}) check_fp32_scalar(op, x);
  check_contiguous(op, {"y", y});
  check_memory(op, {gradient, {"dbias", dbias}, {"loss", loss}}, {output, {"y", y}, {"loss_scale", loss_scale}});
  return s;
}

inline LossShape check_cross_entropy(const Tensor& logits, const Tensor& y, const Tensor& dlogits, const Tensor& dbias,
                                     const Tensor& loss, const Tensor& loss_scale) {
  const char* op = "cross_entropy";
  const LossShape s = check_loss(op, {"logits", logits}, {"dlogits", dlogits}, dbias, loss, y, loss_scale);
  STD_TORCH_CHECK(y.scalar_type() == ScalarType::Long, op, ": y must be int64");
  check_vector(op, {"y", y}, s.n);
  return s;
}

inline LossShape check_mse(const Tensor& output, const Tensor& y, const Tensor& doutput, const Tensor& dbias,
                           const Tensor& loss, const Tensor& loss_scale) {
  const char* op = "mse";
  const LossShape s = check_loss(op, {"output", output}, {"doutput", doutput}, dbias, loss, y, loss_scale);
  check_fp32(op, {"y", y});
  check_matrix(op, {"y", y});
  check_size(op, {"y", y}, s.n, s.c);
  return s;
}

// Returns the number of elements.
inline int64_t check_non_finite(const Tensor& x, const Tensor& found_inf) {
  const char* op = "non_finite";
  STD_TORCH_CHECK(x.numel() > 0, op, ": x is empty");
  check_contiguous(op, {"x", x});
  check_compute_dtype(op, {"x", x});
  check_fp32_scalar(op, {"found_inf", found_inf});
  check_memory(op, {{"found_inf", found_inf}}, {{"x", x}});
  return x.numel();
}

// Returns the number of elements.
inline int64_t check_grad_norm(const Tensor& x, const Tensor& loss_scale, const Tensor& found_inf, const Tensor& norm) {
  const char* op = "grad_norm";
  STD_TORCH_CHECK(x.numel() > 0, op, ": x is empty");
  check_contiguous(op, {"x", x});
  check_compute_dtype(op, {"x", x});
  for (const Argument& s : Arguments{{"loss_scale", loss_scale}, {"found_inf", found_inf}}) check_fp32_scalar(op, s);
  STD_TORCH_CHECK(norm.dim() == 0 && norm.scalar_type() == ScalarType::Double, op, ": norm must be an fp64 scalar");
  check_memory(op, {{"found_inf", found_inf}, {"norm", norm}}, {{"x", x}, {"loss_scale", loss_scale}});
  return x.numel();
}

// Checks the arguments that sgd and adam share, among them the fp32 scalars; returns the number of elements.
inline int64_t check_update(const char* op, Argument master, const Arguments& state,
                            const std::optional<Tensor>& params, Argument grad, const Arguments& scalars) {
  const int64_t n = master.tensor.numel();
  Arguments written{master};
  for (const Argument& x : state) written.push_back(x);
  STD_TORCH_CHECK(n > 0, op, ": master is empty");
  for (const Argument& x : written) check_fp32(op, x);
  if (params) written.push_back({"params", *params});
  Arguments all = written;
  all.push_back(grad);
  for (const Argument& x : all) {
    STD_TORCH_CHECK(x.tensor.numel() == n, op, ": ", x.name, " has ", x.tensor.numel(), " elements, master has ", n);
    check_contiguous(op, x);
  }
  check_compute_dtype(op, grad);
  if (params) check_same_dtype(op, {"params", *params}, grad);
  for (const Argument& x : scalars) check_fp32_scalar(op, x);
  Arguments read = scalars;
  // Each element of grad is read before the element of params is written.
  const bool in_place = params && params->const_data_ptr() == grad.tensor.const_data_ptr();
  if (!in_place) read.push_back(grad);
  check_memory(op, written, read);
  return n;
}

// Returns the number of elements.
inline int64_t check_sgd(const Tensor& master, const std::optional<Tensor>& velocity,
                         const std::optional<Tensor>& params, const Tensor& grad, const Tensor& lr,
                         const Tensor& loss_scale, const Tensor& found_inf, const std::optional<Tensor>& clip,
                         double momentum, bool nesterov) {
  const char* op = "sgd";
  STD_TORCH_CHECK(velocity || momentum == 0, op, ": momentum needs velocity");
  STD_TORCH_CHECK(!nesterov || momentum > 0, op, ": nesterov needs momentum");
  Arguments state, scalars{{"lr", lr}, {"loss_scale", loss_scale}, {"found_inf", found_inf}};
  if (velocity) state.push_back({"velocity", *velocity});
  if (clip) scalars.push_back({"clip", *clip});
  return check_update(op, {"master", master}, state, params, {"grad", grad}, scalars);
}

// Returns the number of elements.
inline int64_t check_adam(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                          const std::optional<Tensor>& params, const Tensor& grad, const Tensor& lr,
                          const Tensor& step, const Tensor& loss_scale, const Tensor& found_inf,
                          const std::optional<Tensor>& clip, double beta1, double beta2, double eps) {
  const char* op = "adam";
  STD_TORCH_CHECK(0 <= beta1 && beta1 < 1, op, ": beta1 is ", beta1, ", expected 0 <= beta1 < 1");
  STD_TORCH_CHECK(0 <= beta2 && beta2 < 1, op, ": beta2 is ", beta2, ", expected 0 <= beta2 < 1");
  STD_TORCH_CHECK(0 <= eps, op, ": eps is ", eps, ", expected at least 0");
  Arguments scalars{{"lr", lr}, {"step", step}, {"loss_scale", loss_scale}, {"found_inf", found_inf}};
  if (clip) scalars.push_back({"clip", *clip});
  return check_update(op, {"master", master}, {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}, params,
                      {"grad", grad}, scalars);
}

inline void check_update_scale(const Tensor& loss_scale, const Tensor& growth_tracker, const Tensor& overflows_left,
                               const Tensor& found_inf) {
  const char* op = "update_scale";
  const Argument scale{"loss_scale", loss_scale}, tracker{"growth_tracker", growth_tracker},
      left{"overflows_left", overflows_left}, found{"found_inf", found_inf};
  for (const Argument& x : {scale, found}) check_fp32_scalar(op, x);
  for (const Argument& x : {tracker, left})
    STD_TORCH_CHECK(x.tensor.dim() == 0 && x.tensor.scalar_type() == ScalarType::Int, op, ": ", x.name,
                    " must be an int32 scalar");
  check_memory(op, {scale, tracker, left}, {found});
}

}  // namespace
