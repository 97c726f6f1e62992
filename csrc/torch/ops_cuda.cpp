// The ops on CUDA.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda/kernels.h"
#include "ops.h"

namespace paged_attn {
namespace {

void check_cuda(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  // Errors of this call alone must not surface in the next.
  (void)cudaGetLastError();
  throw std::runtime_error("paged_attn." + std::string(op) +
                           ": CUDA says: " + cudaGetErrorString(error));
}

// The tensors' device and torch's stream on it, for the length of a call.
class DeviceScope {
 public:
  DeviceScope(const Tensor& tensor, const char* op) : op_(op) {
    const int32_t device = device_of(tensor).index;
    check_torch(aoti_torch_create_device_guard(device, &guard_));
    void* stream = nullptr;
    check_torch(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&limits_.num_sms, cudaDevAttrMultiProcessorCount, device),
               op);
    check_cuda(cudaDeviceGetAttribute(&limits_.shared_memory_per_block,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               op);
    // For tests: makes the choice that a device with less of it would get.
    if (const char* cap = std::getenv("PAGED_ATTN_MAX_SHARED_MEMORY")) {
      limits_.shared_memory_per_block = std::min(limits_.shared_memory_per_block, std::atoi(cap));
    }
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op);
    limits_.has_dependent_launch = major >= 9;
  }
  ~DeviceScope() { aoti_torch_delete_device_guard(guard_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  cudaStream_t stream() const { return stream_; }
  const cuda::DeviceLimits& limits() const { return limits_; }

  void expect_no_capture() const {
    cudaStreamCaptureStatus status{};
    check_cuda(cudaStreamIsCapturing(stream_, &status), op_);
    if (status != cudaStreamCaptureStatusNone) {
      throw std::runtime_error("paged_attn." + std::string(op_) +
                               ": checks are on, which wait for the device, but a CUDA graph is "
                               "being captured. Switch them off: paged_attn.set_checks(False)");
    }
  }

  // `rows` rows of `columns` elements, `stride` apart on the device, one after another on the host.
  template <typename T>
  std::vector<T> to_host(const T* device, int64_t rows, int64_t columns, int64_t stride) const {
    std::vector<T> host(static_cast<size_t>(rows * columns));
    if (!host.empty()) {
      const size_t width = columns * sizeof(T);
      const size_t pitch = rows > 1 ? stride * sizeof(T) : width;
      check_cuda(cudaMemcpy2DAsync(host.data(), width, device, pitch, width, rows,
                                   cudaMemcpyDeviceToHost, stream_),
                 op_);
      check_cuda(cudaStreamSynchronize(stream_), op_);
    }
    return host;
  }

 private:
  const char* op_;
  DeviceGuardHandle guard_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cuda::DeviceLimits limits_{};
};

struct CudaBackend {
  static void decode(const DecodeArguments& arguments, const DecodeParams& params) {
    const DeviceScope scope(arguments.q, arguments.op);
    if (checks_enabled()) check_content(arguments.op, params, scope);
    if (params.num_tokens == 0) return;
    const cuda::DecodeConfig config = cuda::choose_decode_config(params, scope.limits());
    if (config.rings == 0) {
      throw std::runtime_error("paged_attn." + std::string(arguments.op) +
                               ": this GPU's blocks have " +
                               std::to_string(scope.limits().shared_memory_per_block) +
                               " bytes of shared memory, too few for any kernel");
    }
    const auto bytes = static_cast<int64_t>(cuda::decode_scratch_bytes(params, config));
    const Tensor scratch = empty_on_device(arguments.q, {bytes}, aoti_torch_dtype_uint8());
    check_cuda(cuda::decode(params, config, scope.limits(), scratch.data_ptr(), scope.stream()),
               arguments.op);
  }

  static void reshape_and_cache(const ReshapeAndCacheParams& params, const Tensor& slot_mapping) {
    constexpr const char* kOp = "reshape_and_cache";
    const DeviceScope scope(slot_mapping, kOp);
    if (checks_enabled()) {
      scope.expect_no_capture();
      ReshapeAndCacheParams host = params;
      const int64_t bytes = params.num_tokens * (params.slots_are_int64 ? 8 : 4);
      const auto slots =
          scope.to_host(static_cast<const char*>(params.slot_mapping), 1, bytes, bytes);
      host.slot_mapping = slots.data();
      check_slots(kOp, host);
    }
    check_cuda(cuda::reshape_and_cache(params, scope.limits(), scope.stream()), kOp);
  }

 private:
  static void check_content(const char* op, const DecodeParams& params, const DeviceScope& scope) {
    scope.expect_no_capture();
    DecodeParams host = params;
    const auto tables = scope.to_host(params.block_tables, params.batch_size, params.max_blocks,
                                      params.table_stride);
    const auto lengths =
        scope.to_host(params.context_lens, 1, params.batch_size, params.batch_size);
    host.block_tables = tables.data();
    host.table_stride = params.max_blocks;
    host.context_lens = lengths.data();
    std::vector<int32_t> starts;
    if (params.cu_seqlens_q != nullptr) {
      starts = scope.to_host(params.cu_seqlens_q, 1, params.batch_size + 1, params.batch_size + 1);
      host.cu_seqlens_q = starts.data();
    }
    check_decode_content(op, host);
  }
};

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CUDA, m) {
  paged_attn::Ops<paged_attn::CudaBackend>::add_to(m);
}

STABLE_TORCH_LIBRARY_FRAGMENT(paged_attn, m) { m.def("_set_cuda_checks(bool enabled) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("_set_cuda_checks", TORCH_BOX(&paged_attn::set_checks));
}
