// Written by generate.py.
#include "../launch.cuh"

namespace paged_attn::cuda {
template cudaError_t launch_decode<float, float, 256, 1, 1, 2>(
    const DeviceParams&, const DecodeConfig&, const DeviceLimits&, cudaStream_t);
}
