// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<__half, __nv_fp8_e5m2, 64, 4, 2, 8>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
