// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<__half, __nv_fp8_e4m3, 256, 4, 2, 3>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
