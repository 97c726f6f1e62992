// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<__nv_bfloat16, __nv_bfloat16, 128, 2, 4, 4>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
