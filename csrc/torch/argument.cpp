#include "argument.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace paged_attn {
namespace {

std::string shape_name(const int64_t* sizes, int64_t rank) {
  std::string text = "[";
  for (int64_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

}  // namespace

void throw_bad_argument(const char* op, const std::string& argument, const std::string& expected,
                        const std::string& got) {
  throw std::invalid_argument("paged_attn." + std::string(op) + ": " + argument + " must be " +
                              expected + ", got " + got);
}

std::string dtype_name(int32_t code) {
  const struct {
    int32_t code;
    const char* name;
  } names[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const auto& entry : names) {
    if (entry.code == code) return entry.name;
  }
  return "dtype code " + std::to_string(code);
}

std::string device_name(DeviceId device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(device.index);
  return "device type " + std::to_string(device.type);
}

Argument::Argument(const char* op, const char* name, const Tensor& tensor)
    : Argument(op, name, -1, tensor) {}

Argument::Argument(const char* op, const char* name, int64_t index, const Tensor& tensor)
    : op_(op), name_(name), index_(index), tensor_(tensor) {
  if (!tensor.defined()) fail("a tensor", "None");
  rank_ = tensor.dim();
  sizes_ = tensor.sizes().data();
  strides_ = tensor.strides().data();
  dtype_ = dtype_code(tensor);
}

std::string Argument::name() const {
  return index_ < 0 ? name_ : name_ + ("[" + std::to_string(index_) + "]");
}

std::string Argument::shape() const { return shape_name(sizes_, rank_); }
std::string Argument::strides() const { return shape_name(strides_, rank_); }

void* Argument::data() const {
  void* data = tensor_.data_ptr();
  if (data == nullptr && num_elements() > 0) fail("allocated", "a tensor without memory");
  return data;
}

void Argument::fail(const std::string& expected, const std::string& got) const {
  throw_bad_argument(op_, name(), expected, got);
}

void Argument::expect_device_of(const Argument& other) const {
  const DeviceId expected = other.device();
  if (!(device() == expected)) {
    fail("on " + other.name() + "'s device " + device_name(expected), device_name(device()));
  }
}

void Argument::expect_dtype(int32_t dtype) const {
  if (dtype_ != dtype) fail(dtype_name(dtype), dtype_name(dtype_));
}

void Argument::expect_shape(const char* symbols, std::initializer_list<int64_t> sizes) const {
  bool same = rank_ == static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; same && i < rank_; ++i) same = sizes_[i] == sizes.begin()[i];
  if (!same) {
    fail("of shape " + std::string(symbols) + " = " +
             shape_name(sizes.begin(), static_cast<int64_t>(sizes.size())),
         shape());
  }
}

void Argument::expect_shape_of(const Argument& other, int64_t rank) const {
  bool same = rank_ == rank;
  for (int64_t i = 0; same && i < rank; ++i) same = sizes_[i] == other.sizes_[i];
  if (!same) {
    fail("of shape " + shape_name(other.sizes_, rank) + ", as " + other.name() + " says", shape());
  }
}

void Argument::expect_last_dim_contiguous() const {
  if (sizes_[rank_ - 1] > 1 && strides_[rank_ - 1] != 1) {
    fail("contiguous in its last dimension", "stride " + std::to_string(strides_[rank_ - 1]));
  }
}

void Argument::expect_contiguous() const {
  if (tensor_.numel() == 0) return;
  int64_t expected = 1;
  for (int64_t i = rank_; i-- > 0;) {
    if (sizes_[i] > 1 && strides_[i] != expected) {
      fail("contiguous", "strides " + strides());
    }
    expected *= sizes_[i];
  }
}

void Argument::expect_aligned_rows() const {
  const int64_t element = element_bytes();
  const int64_t alignment = sizes_[rank_ - 1] * element % 16 == 0 ? 16 : 8;
  const auto expected = [alignment] {
    return "aligned: every row must start at a multiple of " + std::to_string(alignment) + " bytes";
  };
  for (int64_t i = 0; i + 1 < rank_; ++i) {
    if (sizes_[i] > 1 && strides_[i] * element % alignment != 0) {
      fail(expected(), "stride(" + std::to_string(i) + ") = " + std::to_string(strides_[i]) +
                           " elements of " + std::to_string(element) + " bytes");
    }
  }
  const auto past =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(data()) % static_cast<uintptr_t>(alignment));
  if (past != 0) fail(expected(), "an address " + std::to_string(past) + " bytes past one");
}

void Argument::expect_no_overlap() const {
  if (tensor_.numel() == 0) return;
  // From the narrowest dimension to the widest, each must step over all that lies within one step.
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < rank_; ++i) {
    if (sizes_[i] > 1) dims.push_back(i);
  }
  std::sort(dims.begin(), dims.end(),
            [this](int64_t i, int64_t j) { return strides_[i] < strides_[j]; });
  int64_t last_inside = 0;
  for (const int64_t i : dims) {
    if (strides_[i] <= last_inside) {
      fail("free of internal overlap (was it expanded?)",
           "strides " + strides() + " for shape " + shape());
    }
    last_inside += strides_[i] * (sizes_[i] - 1);
  }
}

}  // namespace paged_attn
