// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<__half, __half, 128, 2, 4, 4>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
