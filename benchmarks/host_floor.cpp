// The least that a call of decode can cost on the host, built by host.py: an op with decode's
// arguments, registered the same way, that allocates the same output and launches one empty kernel.
// As C++ it is for the CPU and launches nothing; as CUDA (nvcc -x cu) it is for the GPU.
#include <optional>
#include <vector>

#include "stable_abi.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define DEVICE_KEY CUDA
#else
#define DEVICE_KEY CPU
#endif

namespace {

#ifdef __CUDACC__
__global__ void empty_kernel() {}
#endif

using paged_attn::OptionalTensor;
using paged_attn::Tensor;

Tensor decode(const Tensor& q, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
              const OptionalTensor&, const OptionalTensor&, std::optional<double>, int64_t, bool,
              int64_t, double, bool) {
  const auto sizes = q.sizes();
  Tensor out = paged_attn::empty_on_device(q, std::vector<int64_t>(sizes.begin(), sizes.end()),
                                           paged_attn::dtype_code(q));
#ifdef __CUDACC__
  void* stream = nullptr;
  paged_attn::check_torch(
      aoti_torch_get_current_cuda_stream(paged_attn::device_of(q).index, &stream));
  empty_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("the empty kernel did not start");
#endif
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(paged_attn_floor, m) {
  m.def(
      "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, "
      "Tensor? cu_seqlens_q=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "Tensor? k_scale=None, Tensor? v_scale=None, *, float? scale=None, SymInt max_query_len=0, "
      "bool causal=True, SymInt window=-1, float softcap=0.0, bool batch_invariant=False) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(paged_attn_floor, DEVICE_KEY, m) { m.impl("decode", TORCH_BOX(&decode)); }
