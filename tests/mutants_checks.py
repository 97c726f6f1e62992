"""Bugs in the checks that both devices share, seen on the CPU."""

from __future__ import annotations

from mutant import Mutant

CHECKS = [
    Mutant(
        "negative_id_passes",
        "checks mode names every id outside the pool",
        "csrc/torch/content.cpp",
        "if (id < 0 || id >= p.num_blocks) {",
        "if (id >= p.num_blocks) {",
        "test_checks.py::test_checks_raise_before_writing",
    ),
    Mutant(
        "length_one_past_capacity_passes",
        "checks mode names every length beyond the table",
        "csrc/torch/content.cpp",
        "if (length > capacity) {",
        "if (length > capacity + 1) {",
        "test_checks.py::test_checks_raise_before_writing",
    ),
    Mutant(
        "falling_cu_seqlens_pass",
        "checks mode names every entry below the one before it",
        "csrc/torch/content.cpp",
        "if (cu_seqlens_q[i] < least || cu_seqlens_q[i] > num_tokens) {",
        "if (cu_seqlens_q[i] > num_tokens) {",
        "test_checks.py::test_checks_of_cu_seqlens",
    ),
    Mutant(
        "hidden_entries_are_checked",
        "checks mode lets good content pass",
        "csrc/torch/content.cpp",
        "check_positions(op, p, b, p.first_visible_key(p.context_lens[b], queries));",
        "check_positions(op, p, b, 0);",
        "test_checks.py::test_checks_of_a_window",
    ),
    Mutant(
        "first_slot_past_the_pool_passes",
        "checks mode names every slot past the pool",
        "csrc/torch/content.cpp",
        "if (slot >= num_slots) {",
        "if (slot > num_slots) {",
        "test_cache.py::test_checks",
    ),
    Mutant(
        "limits_of_swap_exchanged",
        "each side of swap_blocks has its own number of blocks",
        "csrc/torch/content.cpp",
        "i % 2 == 0 ? source_blocks : destination_blocks;",
        "i % 2 == 1 ? source_blocks : destination_blocks;",
        "test_blocks.py::test_checks_of_swap",
    ),
    Mutant(
        "heads_need_not_be_a_multiple",
        "every wrong argument raises",
        "csrc/torch/checks.cpp",
        "if (p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0) {",
        "if (p.num_heads < 1) {",
        "test_arguments.py::test_wrong_decode",
    ),
    Mutant(
        "v_cache_of_any_shape",
        "every wrong argument raises",
        "csrc/torch/shared_checks.cpp",
        "v_cache.expect_shape_of(k_cache, 4);",
        "",
        "test_arguments.py::test_wrong_decode",
    ),
    Mutant(
        "one_scale_for_all_heads",
        "scales are of the KV head",
        "csrc/torch/shared_checks.cpp",
        "one_a_head && num_kv_heads > 1 ? 1 : 0",
        "one_a_head && num_kv_heads > 1 ? 0 : 0",
        "test_options.py::test_scales_are_of_the_kv_head",
    ),
    Mutant(
        "neighbours_on_one_side_are_one_run",
        "swap_blocks moves every pair to where it says",
        "csrc/torch/cache_checks.cpp",
        "destination == runs.back().destination + runs.back().count",
        "destination > runs.back().destination",
        "test_blocks.py::test_swap_of_neighbours_on_one_side_only",
    ),
    Mutant(
        "expanded_outputs_pass",
        "what is written has no two indices for one element",
        "csrc/torch/argument.cpp",
        "if (strides_[i] <= last_inside) {",
        "if (strides_[i] < last_inside) {",
        "test_block_arguments.py::test_wrong_copy_blocks",
    ),
    Mutant(
        "strides_of_single_elements_are_believed",
        "the stride of a dimension of size 1 may be anything",
        "csrc/torch/argument.h",
        "return sizes_[dim] > 1 ? strides_[dim] : 0;",
        "return strides_[dim];",
        "test_strides.py::test_strides_of_single_elements_mean_nothing"
        " test_blocks.py::test_strides_of_single_elements_mean_nothing"
        " test_merge_states.py::test_strides test_append.py::test_every_layout",
    ),
]
