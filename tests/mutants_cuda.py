"""Bugs in the CUDA kernels, seen on a GPU only."""

from __future__ import annotations

from functools import partial

from mutant import Mutant

DECODE = "csrc/cuda/decode"
# What tests run with q of 16 bits, at most 64 head dims and at most 8 query rows a KV head, ...
HALF = partial(Mutant, device="cuda", shape="{64, 2, 2, 8, 1, 4}")
# ... with an fp8 cache besides, and with q in fp32.
FP8 = partial(Mutant, device="cuda", shape="{64, 2, 1, 8, 1, 8}")
FLOAT = partial(Mutant, device="cuda", shape="{64, 4, 4, 8, 1, 2}")
NO_DECODE = partial(Mutant, device="cuda")

KERNELS = [
    HALF(
        "cuda_mask_dropped",
        "slots past the context have no weight",
        f"{DECODE}/kernel.cuh",
        "if (!sees(token + 8, 1)) s.w = -INFINITY;",
        "",
        "test_numerics.py::test_zero_query_gives_the_mean[cuda-dtype0-None]",
    ),
    HALF(
        "cuda_window_one_too_narrow",
        "a window is w keys, itself included",
        f"{DECODE}/kernel.cuh",
        "key >= limit[row] - params.window;",
        "key > limit[row] - params.window;",
        "test_options.py::test_window_of_one_gives_its_own_value[cuda-dtype0-None]",
    ),
    HALF(
        "cuda_softcap_after_the_mask",
        "hidden keys have no weight, whatever the options",
        f"{DECODE}/kernel.cuh",
        "if (!sees(token, 0)) s.x = -INFINITY;",
        "if (!sees(token, 0)) s.x = params.has_transforms ? -params.decode.softcap : -INFINITY;",
        "test_options.py::test_split_contexts[cuda-None-softcap-lens1]",
    ),
    HALF(
        "cuda_later_unit_keeps_state",
        "rows that a block computes one after another share nothing",
        f"{DECODE}/kernel.cuh",
        "    state.clear();\n    target =",
        "    target =",
        "test_numerics.py::test_flashinfer_grid[cuda-128-54-16]",
    ),
    HALF(
        "cuda_int32_offset",
        "pools may pass 2^31 elements",
        f"{DECODE}/tile.cuh",
        "static_cast<uint32_t>(id) * strides.block +",
        "static_cast<int32_t>(static_cast<uint32_t>(id) * strides.block) +",
        "test_large.py::test_strides_beyond_two_to_the_31[cuda]",
    ),
    HALF(
        "cuda_k_and_v_strides_swapped",
        "each cache has strides of its own",
        f"{DECODE}/tile.cuh",
        "copy(shared + kTileBytes, p.v_cache, p.v_strides);",
        "copy(shared + kTileBytes, p.v_cache, p.k_strides);",
        "test_strides.py::test_caches_of_different_strides_are_not_swapped[cuda]",
    ),
    HALF(
        "cuda_tail_times_zero",
        "NaN in unused slots never matters",
        f"{DECODE}/tile.cuh",
        "id < 0 ? 0 : current_.context_len - (current_.tile << kTileShift) - hidden_rows;",
        "id < 0 ? 0 : kTileTokens - hidden_rows;",
        "test_numerics.py::test_zero_query_gives_the_mean[cuda-dtype0-None]",
    ),
    HALF(
        "cuda_entry_past_the_live_part_read",
        "table entries past the live part never matter",
        f"{DECODE}/tile.cuh",
        "token < batch.context_len &&",
        "token <= batch.context_len &&",
        "test_masking.py::test_table_entries_past_the_live_part[cuda-1-None]",
    ),
    HALF(
        "cuda_bad_id_unnoticed",
        "ids outside the pool give NaN",
        f"{DECODE}/tile.cuh",
        "current_.block_id >= params_.decode.num_blocks;",
        "current_.block_id > params_.decode.num_blocks;",
        "test_safety.py::test_bad_id_in_the_live_part[cuda-N-0-None]",
    ),
    FLOAT(
        "cuda_output_not_rescaled",
        "the online softmax is the softmax",
        f"{DECODE}/softmax.cuh",
        "for (int i = 0; i < kFragments; ++i) scale_rows(out[i], factor);",
        "for (int i = 0; i < kFragments; ++i) scale_rows(out[i], make_float2(1, 1));",
        "test_numerics.py::test_growing_maximum[cuda]",
    ),
    HALF(
        "cuda_split_merge_of_other_parts",
        "parts are weighed by their own maxima",
        f"{DECODE}/combine.cuh",
        "shuffle(source < 8 ? factors[0] : factors[1], (source & 7) * 4 + (lane_ & 3))",
        "shuffle(factors[0], (source & 7) * 4 + (lane_ & 3))",
        "test_options.py::test_split_contexts[cuda-None-plain-lens0]",
    ),
    HALF(
        "cuda_sink_counted_twice",
        "a sink joins the denominator once",
        f"{DECODE}/results.cuh",
        "sink_weight = power_of_2(sink - top);",
        "sink_weight = 2 * power_of_2(sink - top);",
        "test_options.py::test_sinks_join_once_when_split[cuda]",
    ),
    HALF(
        "cuda_lse_in_base_2",
        "lse is the natural logarithm",
        f"{DECODE}/results.cuh",
        "result.lse = (reference + log2f(exact_sum)) * kLn2;",
        "result.lse = reference + log2f(exact_sum);",
        "test_numerics.py::test_zero_query_gives_the_mean[cuda-dtype0-None]",
    ),
    HALF(
        "cuda_alibi_sign",
        "ALiBi adds slope * (j - i)",
        f"{DECODE}/scores.cuh",
        "static_cast<float>(key + 1 - limit[r]);",
        "static_cast<float>(limit[r] - key - 1);",
        "test_options.py::test_steep_slopes_choose_one_key[cuda-None-dtype0]",
    ),
    HALF(
        "cuda_k_scale_of_the_wrong_head",
        "scales are of the KV head",
        f"{DECODE}/scores.cuh",
        "min(static_cast<int64_t>(kv_head), last) * k_scale.stride",
        "last * k_scale.stride",
        "test_options.py::test_scales_are_of_the_kv_head[cuda-k_scale]",
    ),
    HALF(
        "cuda_query_heads_interleaved",
        "query head h reads KV head h / (H / G)",
        f"{DECODE}/rows.cuh",
        "return kv_head * params.group + first + row - token(params, row) * params.group;",
        "return kv_head + (first + row - token(params, row) * params.group) *"
        " static_cast<int>(params.decode.num_kv_heads);",
        "test_masking.py::test_groups_do_not_cross_kv_heads[cuda-3]",
    ),
    HALF(
        "cuda_bad_ragged_begin_unnoticed",
        "a bad cu_seqlens_q gives NaN",
        f"{DECODE}/sequence.cuh",
        "__ldcg(p.cu_seqlens_q + b) != begin || ",
        "",
        "test_safety.py::test_bad_cu_seqlens",
    ),
    HALF(
        "cuda_chunks_by_batch",
        "with batch_invariant a sequence's bits are its own",
        f"{DECODE}/schedule.cuh",
        "constexpr int kFewest = 32;",
        "const int kFewest = params.decode.batch_size > 1 ? 32 : 16;",
        "test_batch_invariance.py::test_each_sequence_alone[plain-cuda-None]",
    ),
    HALF(
        "cuda_head_lanes_by_batch",
        "with batch_invariant a sequence's bits are its own",
        f"{DECODE}/heuristics.h",
        "if (p.batch_invariant) config.head_lanes = 1;",
        "",
        "test_batch_invariance.py::test_each_sequence_alone[plain-cuda-None]",
    ),
    HALF(
        "cuda_empty_sequence_is_nan",
        "a length of 0 gives 0",
        f"{DECODE}/prepare.cu",
        "empty.context_len < 0, true);",
        "empty.context_len <= 0, true);",
        "test_numerics.py::test_lengths_without_keys[cuda-None-dtype0]",
    ),
    HALF(
        "cuda_arrivals_not_zeroed",
        "scratch may hold anything",
        f"{DECODE}/prepare.cu",
        "params.arrivals[i] = 0;",
        "",
        "test_cuda.py::test_scratch_may_hold_anything[None-dtype0]",
    ),
    FP8(
        "cuda_fp8_types_swapped",
        "e4m3 is read as e4m3",
        f"{DECODE}/decode.cu",
        "launch_matching<T, __nv_fp8_e4m3>(params",
        "launch_matching<T, __nv_fp8_e5m2>(params",
        "test_fp8.py::test_fp8_of_every_head_dim[cuda-40-cache_dtype0-dtype0]",
    ),
    HALF(
        "cuda_default_stream",
        "work runs on torch's current stream",
        "csrc/torch/ops_cuda.cpp",
        "stream_ = static_cast<cudaStream_t>(stream);",
        "stream_ = nullptr;",
        "test_cuda.py::test_side_stream[None]",
    ),
    NO_DECODE(
        "cuda_slot_minus_one_wraps",
        "negative slots are skipped",
        "csrc/cuda/cache.cu",
        "if (slot < 0 || slot >= p.num_blocks * p.block_size) return {-1, 0, 0, 0};",
        "if (slot < 0 || slot >= p.num_blocks * p.block_size)"
        " return {slot == -1 ? p.num_blocks - 1 : -1, p.block_size - 1, 0, token};",
        "test_cache.py::test_writes_exactly_the_slots",
    ),
    NO_DECODE(
        "cuda_append_position_off_by_one",
        "context_lens includes the new tokens",
        "csrc/cuda/cache.cu",
        "p.context_lens[batch] - past_end;",
        "p.context_lens[batch] - past_end + 1;",
        "test_append.py::test_every_layout",
    ),
    NO_DECODE(
        "cuda_copy_direction_swapped",
        "copy_blocks copies pair[0] to pair[1]",
        "csrc/cuda/blocks.cu",
        "copy_run(reinterpret_cast<const Piece*>(from), reinterpret_cast<Piece*>(to), first,",
        "copy_run(reinterpret_cast<const Piece*>(to),"
        " reinterpret_cast<Piece*>(const_cast<char*>(from)), first,",
        "test_blocks.py::test_copy_of_every_layout",
    ),
    NO_DECODE(
        "cuda_merge_reads_empty_states",
        "a state that saw nothing may hold anything",
        "csrc/cuda/merge_states.cu",
        "if (lse == -INFINITY) continue;",
        "",
        "test_merge_states.py::test_parts_that_saw_nothing_vanish",
    ),
]
