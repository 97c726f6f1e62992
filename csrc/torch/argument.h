// One tensor argument of one op: its metadata, read once, and the checks on it. A check that fails
// throws std::invalid_argument: `paged_attn.<op>: <argument> must be <expected>, got <what came>`.
#pragma once

#include <initializer_list>
#include <string>

#include "stable_abi.h"

namespace paged_attn {

[[noreturn]] void throw_bad_argument(const char* op, const std::string& argument,
                                     const std::string& expected, const std::string& got);

std::string dtype_name(int32_t code);
std::string device_name(DeviceId device);

class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor);
  // One of a list: its name is name[index].
  Argument(const char* op, const char* name, int64_t index, const Tensor& tensor);

  const char* op() const { return op_; }
  std::string name() const;
  int64_t rank() const { return rank_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  // stride(), but 0 in a dimension of size 1, where a stride may be anything.
  int64_t step(int64_t dim) const { return sizes_[dim] > 1 ? strides_[dim] : 0; }
  int32_t dtype() const { return dtype_; }
  int64_t num_elements() const { return tensor_.numel(); }
  int64_t element_bytes() const { return static_cast<int64_t>(tensor_.element_size()); }
  DeviceId device() const { return device_of(tensor_); }
  std::string shape() const;
  std::string strides() const;
  // Fails for a tensor whose storage was freed under it (`storage.resize_(0)`).
  void* data() const;
  template <typename T>
  T* data_as() const {
    return static_cast<T*>(data());
  }

  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

  void expect_device_of(const Argument& other) const;
  void expect_dtype(int32_t dtype) const;
  // `symbols` tells what the sizes mean, "[num_heads]" say.
  void expect_shape(const char* symbols, std::initializer_list<int64_t> sizes) const;
  void expect_shape_of(const Argument& other, int64_t rank) const;
  void expect_last_dim_contiguous() const;
  void expect_contiguous() const;
  // Kernels load rows in pieces of up to 16 bytes: rows start at multiples of gcd(16, row bytes).
  void expect_aligned_rows() const;
  // A tensor that is written must not have two indices for one element.
  void expect_no_overlap() const;

 private:
  const char* op_;
  const char* name_;
  int64_t index_;  // in its list; -1: in none
  const Tensor& tensor_;
  int64_t rank_ = 0;
  const int64_t* sizes_ = nullptr;
  const int64_t* strides_ = nullptr;
  int32_t dtype_ = 0;
};

}  // namespace paged_attn
