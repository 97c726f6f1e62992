// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<__nv_bfloat16, __nv_fp8_e4m3, 128, 4, 2, 2>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
