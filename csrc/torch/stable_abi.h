// All that this library takes from torch: the stable ABI, so that one binary serves every torch
// from 2.10 on. Going back to the unstable C++ API would change this file alone.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace paged_attn {

using Tensor = torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Throws what went wrong behind torch's C interface ("out of memory", most of all), as far as the
// torch that runs can tell: 2.13 and later can.
inline void check_torch(AOTITorchError error) {
  if (error == AOTI_TORCH_SUCCESS) return;
  using What = const char* (*)();
  const auto what =
      reinterpret_cast<What>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* text = what != nullptr ? what() : nullptr;
  throw std::runtime_error(text != nullptr ? text : "paged_attn: a call into torch failed");
}

// torch's dtype codes are read through functions of its ABI; comparing codes is cheaper than
// converting them to an enum in every call.
inline int32_t dtype_code(const Tensor& tensor) {
  int32_t code = 0;
  check_torch(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

struct DeviceId {
  int32_t type;
  int32_t index;
  bool operator==(const DeviceId& other) const {
    return type == other.type && index == other.index;
  }
};

inline DeviceId device_of(const Tensor& tensor) {
  DeviceId device{};
  check_torch(aoti_torch_get_device_type(tensor.get(), &device.type));
  check_torch(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

// An uninitialised contiguous tensor on `like`'s device.
inline Tensor empty_on_device(const Tensor& like, const std::vector<int64_t>& sizes,
                              int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
  }
  const DeviceId device = device_of(like);
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                       strides.data(), dtype, device.type, device.index, &handle));
  return Tensor(handle);
}

// Memory of torch's CUDA allocator on the current stream, for as long as it is in scope: what is
// launched meanwhile may use it. Without a tensor around it, which costs the host as much as all
// else that a call allocates; not every version of torch has such functions.
class Scratch {
 public:
  Scratch(const Tensor& like, int64_t bytes) {
    using Allocate = AOTITorchError (*)(uint64_t, void**);
    static const auto allocate = reinterpret_cast<Allocate>(
        dlsym(RTLD_DEFAULT, "aoti_torch_cuda_caching_allocator_raw_alloc"));
    if (allocate != nullptr && free_function() != nullptr) {
      check_torch(allocate(static_cast<uint64_t>(bytes), &data_));
    } else {
      tensor_ = empty_on_device(like, {bytes}, aoti_torch_dtype_uint8());
    }
  }
  ~Scratch() {
    if (data_ != nullptr) (void)free_function()(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return tensor_ ? tensor_->data_ptr() : data_; }

 private:
  using Free = AOTITorchError (*)(void*);
  static Free free_function() {
    static const auto free =
        reinterpret_cast<Free>(dlsym(RTLD_DEFAULT, "aoti_torch_cuda_caching_allocator_raw_delete"));
    return free;
  }

  void* data_ = nullptr;
  OptionalTensor tensor_;
};

// Runs body(context, i) for i in [0, n) on torch's intra-op threads.
inline void run_on_torch_threads(int64_t n, void (*body)(void* context, int64_t i), void* context) {
  torch::stable::parallel_for(0, n, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, i);
  });
}

}  // namespace paged_attn
