// The ops on CUDA.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <list>
#include <mutex>
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
  std::string message =
      "paged_attn." + std::string(op) + ": CUDA says: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    message +=
        " (python -m paged_attn tells the architectures compiled for; rebuild with "
        "TORCH_CUDA_ARCH_LIST naming this GPU's)";
  }
  throw std::runtime_error(message);
}

// For tests: blocks get no more than this, as on a device with less.
std::atomic<int64_t>& shared_memory_cap() {
  static std::atomic<int64_t> cap(std::numeric_limits<int32_t>::max());
  return cap;
}

int64_t set_shared_memory_cap(int64_t bytes) { return shared_memory_cap().exchange(bytes); }

std::atomic<bool>& early_start() {
  static std::atomic<bool> enabled(false);
  return enabled;
}

bool set_early_start(bool enabled) { return early_start().exchange(enabled); }

// For compute-sanitizer's initcheck: see fill_counters().
bool fills_counters() {
  static const bool fills = std::getenv("PAGED_ATTN_FILL_COUNTERS") != nullptr;
  return fills;
}

// For benchmarks/tune.py and tests: what counts instead of the table of tuning.h, if not null.
std::atomic<const cuda::Tuning*>& tuning_in_place_of_the_table() {
  static std::atomic<const cuda::Tuning*> tuning(nullptr);
  return tuning;
}

void set_tuning(const std::vector<int64_t>& numbers) {
  // None is freed: calls on other threads may be reading it.
  static std::list<cuda::Tuning> kept;
  static std::mutex mutex;
  const cuda::Tuning* tuning = nullptr;
  if (!numbers.empty()) {
    const cuda::Tuning wanted = cuda::to_tuning(numbers);
    const std::lock_guard<std::mutex> lock(mutex);
    tuning = &kept.emplace_back(wanted);
  }
  tuning_in_place_of_the_table().store(tuning);
}

// Asked for once a thread and device: they do not change.
const cuda::DeviceLimits& device_limits(int32_t device, const char* op) {
  thread_local int32_t known_device = -1;
  thread_local cuda::DeviceLimits limits{};
  if (known_device != device) {
    known_device = -1;
    limits.device = device;
    check_cuda(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device), op);
    check_cuda(cudaDeviceGetAttribute(&limits.shared_memory_per_block,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               op);
    check_cuda(cuda::has_dependent_launch(limits.has_dependent_launch), op);
    int major = 0, minor = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op);
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), op);
    limits.tuning = cuda::tuning_of(10 * major + minor, limits.num_sms);
    known_device = device;
  }
  return limits;
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    check_torch(aoti_torch_create_device_guard(device, &handle_));
  }
  ~DeviceGuard() { aoti_torch_delete_device_guard(handle_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  DeviceGuardHandle handle_ = nullptr;
};

// The tensors' device and torch's stream on it, for the length of a call.
class DeviceScope {
 public:
  DeviceScope(const Tensor& tensor, const char* op) : DeviceScope(device_of(tensor).index, op) {}
  DeviceScope(int32_t device, const char* op) : op_(op), device_(device), guard_(device) {
    void* stream = nullptr;
    check_torch(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
    limits_ = device_limits(device_, op);
    limits_.shared_memory_per_block = static_cast<int>(
        std::min<int64_t>(limits_.shared_memory_per_block, shared_memory_cap().load()));
    if (const cuda::Tuning* instead = tuning_in_place_of_the_table().load()) {
      limits_.tuning = *instead;
    }
  }

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

  template <typename T>
  std::vector<T> to_host(const T* device, int64_t count) const {
    std::vector<T> host(static_cast<size_t>(count));
    if (!host.empty()) {
      check_cuda(cudaMemcpyAsync(host.data(), device, host.size() * sizeof(T),
                                 cudaMemcpyDeviceToHost, stream_),
                 op_);
      check_cuda(cudaStreamSynchronize(stream_), op_);
    }
    return host;
  }

 private:
  const char* op_;
  int32_t device_;
  DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  cuda::DeviceLimits limits_{};
};

std::vector<int64_t> tuning(int64_t device) {
  return cuda::to_list(DeviceScope(static_cast<int32_t>(device), "_tuning").limits().tuning);
}

// What `later` gets from now on runs after what `earlier`, a stream of `device`, has got until now.
void order(int32_t device, cudaStream_t earlier, cudaStream_t later, const char* op) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), op);
  cudaError_t error = cudaEventRecord(event, earlier);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(later, event);
  (void)cudaEventDestroy(event);
  check_cuda(error, op);
}

struct CudaBackend {
  static void decode(const DecodeArguments& arguments, const DecodeParams& params) {
    const DeviceScope scope(arguments.q, arguments.op);
    if (checks_enabled()) check_decode_content(arguments.op, params, scope);
    launch_decode(arguments, params, nullptr, scope);
  }

  static void write_kv(const char* op, const Tensor& key, const WriteKvParams& params) {
    const DeviceScope scope(key, op);
    if (checks_enabled()) check_write_content(op, params, scope);
    check_cuda(cuda::write_kv(params, scope.limits(), scope.stream()), op);
  }

  static void append_decode(const DecodeArguments& arguments, const WriteKvParams& write,
                            const DecodeParams& params) {
    const DeviceScope scope(arguments.q, arguments.op);
    // Whatever the new tokens are written through, decode reads.
    if (checks_enabled()) check_decode_content(arguments.op, params, scope);
    launch_decode(arguments, params, &write, scope);
  }

  static void copy_blocks(const CopyBlocksParams& params, const Tensor& block_mapping) {
    constexpr const char* kOp = "copy_blocks";
    const DeviceScope scope(block_mapping, kOp);
    if (checks_enabled()) {
      scope.expect_no_capture();
      const auto mapping = scope.to_host(params.block_mapping, 2 * params.num_pairs);
      check_block_mapping_content(kOp, mapping.data(), params.num_pairs, params.num_blocks,
                                  params.num_blocks);
    }
    check_cuda(cuda::copy_blocks(params, scope.stream()), kOp);
  }

  // Between two devices as torch copies: on the source's stream, which waits for the destination's
  // and for which that then waits.
  static void swap_blocks(const SwapBlocksParams& params, const std::vector<BlockRun>& runs) {
    constexpr const char* kOp = "swap_blocks";
    int32_t any_device = 0;
    for (const SwapDevices& devices : params.devices) {
      for (const DeviceId& device : {devices.source, devices.destination}) {
        if (is_cuda(device)) any_device = device.index;
      }
    }
    for (size_t i = 0; i < params.pairs.size(); ++i) {
      const auto& [source, destination] = params.devices[i];
      const int32_t device = is_cuda(source)        ? source.index
                             : is_cuda(destination) ? destination.index
                                                    : any_device;
      const DeviceScope scope(device, kOp);
      if (!is_cuda(destination) || destination.index == device) {
        check_cuda(cuda::swap_blocks(params.pairs[i], runs, scope.stream()), kOp);
        continue;
      }
      void* handle = nullptr;
      check_torch(aoti_torch_get_current_cuda_stream(destination.index, &handle));
      const auto other = static_cast<cudaStream_t>(handle);
      order(destination.index, other, scope.stream(), kOp);
      check_cuda(cuda::swap_blocks(params.pairs[i], runs, scope.stream()), kOp);
      order(device, scope.stream(), other, kOp);
    }
  }

  static void merge_states(const MergeStatesParams& params, const Tensor& out) {
    constexpr const char* kOp = "merge_states";
    const DeviceScope scope(out, kOp);
    check_cuda(cuda::merge_states(params, scope.limits(), scope.stream()), kOp);
  }

 private:
  static bool is_cuda(const DeviceId& device) {
    return device.type == aoti_torch_device_type_cuda();
  }

  static void launch_decode(const DecodeArguments& arguments, const DecodeParams& params,
                            const WriteKvParams* new_tokens, const DeviceScope& scope) {
    if (params.num_tokens == 0) return;
    const cuda::DecodeConfig config = cuda::choose_decode_config(params, scope.limits());
    if (config.rings == 0) {
      throw std::runtime_error("paged_attn." + std::string(arguments.op) +
                               ": this GPU's blocks have " +
                               std::to_string(scope.limits().shared_memory_per_block) +
                               " bytes of shared memory, too few for any kernel");
    }
    if (config.line_shift > cuda::kMostLineShift) {
      throw std::invalid_argument("paged_attn." + std::string(arguments.op) +
                                  ": q must be of fewer than 2^30 sequences x KV heads, got " +
                                  std::to_string(params.batch_size) + " x " +
                                  std::to_string(params.num_kv_heads));
    }
    const auto bytes = static_cast<int64_t>(cuda::decode_scratch_bytes(params, config));
    const Scratch scratch(arguments.q, bytes);
    if (fills_counters()) {
      check_cuda(cuda::fill_counters(params, config, scratch.data(), scope.stream()), arguments.op);
    }
    check_cuda(cuda::decode(params, new_tokens, early_start().load(std::memory_order_relaxed),
                            config, scope.limits(), scratch.data(), scope.stream()),
               arguments.op);
  }

  // Hands check(params) tables, lengths and cu_seqlens_q in host memory. Params: DecodeParams or
  // WriteKvParams.
  template <typename Params, typename Check>
  static void with_sequences_on_host(const Params& params, const DeviceScope& scope,
                                     const Check& check) {
    scope.expect_no_capture();
    Params host = params;
    // All that lies between the first and the last entry: rows may be apart, or one for all.
    const bool has_entries = params.batch_size > 0 && params.max_blocks > 0;
    const auto tables = scope.to_host(
        params.block_tables,
        has_entries ? (params.batch_size - 1) * params.table_stride + params.max_blocks : 0);
    const auto lengths = scope.to_host(params.context_lens, params.batch_size);
    host.block_tables = tables.data();
    host.context_lens = lengths.data();
    std::vector<int32_t> starts;
    if (params.cu_seqlens_q != nullptr) {
      starts = scope.to_host(params.cu_seqlens_q, params.batch_size + 1);
      host.cu_seqlens_q = starts.data();
    }
    check(host);
  }

  static void check_decode_content(const char* op, const DecodeParams& params,
                                   const DeviceScope& scope) {
    with_sequences_on_host(params, scope, [op](const DecodeParams& host) {
      paged_attn::check_decode_content(op, host);
    });
  }

  static void check_write_content(const char* op, const WriteKvParams& params,
                                  const DeviceScope& scope) {
    if (params.slot_mapping == nullptr) {
      with_sequences_on_host(params, scope, [op](const WriteKvParams& host) {
        paged_attn::check_write_content(op, host);
      });
      return;
    }
    scope.expect_no_capture();
    WriteKvParams host = params;
    const int64_t bytes = params.num_tokens * (params.slots_are_int64 ? 8 : 4);
    const auto slots = scope.to_host(static_cast<const char*>(params.slot_mapping), bytes);
    host.slot_mapping = slots.data();
    paged_attn::check_write_content(op, host);
  }
};

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CUDA, m) {
  paged_attn::Ops<paged_attn::CudaBackend>::add_to(m);
}

STABLE_TORCH_LIBRARY_FRAGMENT(paged_attn, m) {
  m.def("_set_cuda_checks(bool enabled) -> bool");
  m.def("_set_early_start(bool enabled) -> bool");
  m.def("_set_shared_memory_cap(int bytes) -> int");
  m.def("_set_tuning(int[] numbers) -> ()");
  m.def("_tuning(int device) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("_set_cuda_checks", TORCH_BOX(&paged_attn::set_checks));
  m.impl("_set_early_start", TORCH_BOX(&paged_attn::set_early_start));
  m.impl("_set_shared_memory_cap", TORCH_BOX(&paged_attn::set_shared_memory_cap));
  m.impl("_set_tuning", TORCH_BOX(&paged_attn::set_tuning));
  m.impl("_tuning", TORCH_BOX(&paged_attn::tuning));
}
