// What becomes of q . k before the softmax.
#pragma once

#include "rows.cuh"

namespace paged_attn::cuda {

// The factor of a KV head's scores.
__device__ __forceinline__ float score_factor(const DeviceParams& params, int kv_head) {
  const CacheScale& k_scale = params.decode.k_scale;
  if (k_scale.data == nullptr) return params.score_factor;
  const int64_t last = params.decode.num_kv_heads - 1;  // a spare head lane asks for more
  return params.score_factor *
         __ldcg(k_scale.data + min(static_cast<int64_t>(kv_head), last) * k_scale.stride);
}

// softcap * tanh(s / softcap) + slope * (j - i): a tile's scores, as mma.cuh lays them out, of rows
// that see keys below `limit`.
__device__ __forceinline__ float4 transform_scores(const DeviceParams& params, const RowTile& rows,
                                                   const int (&limit)[2], int tile, float4 s,
                                                   int lane) {
  const float softcap = params.decode.softcap;
  if (softcap > 0) {
    s = make_float4(softcap * tanhf(s.x / softcap), softcap * tanhf(s.y / softcap),
                    softcap * tanhf(s.z / softcap), softcap * tanhf(s.w / softcap));
  }
  if (params.decode.alibi_slopes != nullptr) {
    const int row = 2 * (lane & 3);
    const int key = tile * kTileTokens + (lane >> 2);
    float slope[2] = {}, distance[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows.exists(row + r)) {
        slope[r] = __ldcg(params.decode.alibi_slopes + rows.head(params, row + r));
      }
      distance[r] = static_cast<float>(key + 1 - limit[r]);
    }
    s = make_float4(fmaf(slope[0], distance[0], s.x), fmaf(slope[1], distance[1], s.y),
                    fmaf(slope[0], distance[0] + 8, s.z), fmaf(slope[1], distance[1] + 8, s.w));
  }
  return s;
}

}  // namespace paged_attn::cuda
