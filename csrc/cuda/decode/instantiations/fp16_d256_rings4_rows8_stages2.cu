// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<__half, __half, 256, 4, 1, 2>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
