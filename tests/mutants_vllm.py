"""Bugs in what vLLM gets, seen without vLLM."""

from __future__ import annotations

from functools import partial

from mutant import Mutant

BATCH = "paged_attn/integrations/_vllm_batch.py"
BACKEND = "paged_attn/integrations/_vllm_backend.py"
PREFILL = "paged_attn/integrations/_vllm_flash_prefill.py"

STEPS = partial(Mutant, tests="test_vllm_backend.py::test_steps")
OPTIONS = partial(Mutant, tests="test_vllm_backend.py::test_options")
FLASH = partial(Mutant, tests="test_vllm_backend.py::test_prefill_goes_to_vllms_flash_attention")

VLLM = [
    STEPS(
        "vllm_prefill_rows_counted_from_the_batch",
        "a prefill's rows are counted from the first prefill",
        BATCH,
        "starts - row if row else starts,",
        "starts,",
    ),
    STEPS(
        "vllm_padding_requests_shift_rows",
        "requests without a query own no row",
        BATCH,
        "single = bound == 1 and row == cut",
        "single = bound == 1",
    ),
    STEPS(
        "vllm_longest_prefill_bounded_as_a_decode",
        "no query of a prefill is over the bound that decode is told",
        BATCH,
        "            max_query_len,\n        )\n    return",
        "            decode_query_len,\n        )\n    return",
    ),
    STEPS(
        "vllm_lengths_of_the_whole_buffer",
        "requests beyond the step's are not looked at",
        BACKEND,
        "common.seq_lens[:num_reqs],",
        "common.seq_lens,",
    ),
    STEPS(
        "vllm_keys_and_values_swapped",
        "a token's K comes before its V",
        BATCH,
        "k_cache, v_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)",
        "v_cache, k_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)",
    ),
    OPTIONS(
        "vllm_scales_of_an_unscaled_cache",
        "a cache of the model's dtype has no scales",
        BACKEND,
        "if self.kv_cache_dtype not in _vllm_batch.FP8_CACHES:",
        "if self.kv_cache_dtype is None:",
    ),
    OPTIONS(
        "vllm_e5m2_read_as_e4m3",
        "each fp8 cache is read as what it is",
        BATCH,
        '"fp8_e5m2": torch.float8_e5m2,',
        '"fp8_e5m2": torch.float8_e4m3fn,',
    ),
    OPTIONS(
        "vllm_window_left_out",
        "a layer's window reaches decode",
        BACKEND,
        '"window": self.sliding_window,',
        '"window": -1,',
    ),
    Mutant(
        "vllm_scales_left_out_of_writing",
        "fp8 caches hold keys over their scale",
        BACKEND,
        "key, value, k_cache, v_cache, slot_mapping, **self._scales(layer)",
        "key, value, k_cache, v_cache, slot_mapping",
        "test_vllm_backend.py::test_writes",
    ),
    FLASH(
        "vllm_flash_window_one_wider",
        "FlashAttention's window has the query's own key beside it",
        PREFILL,
        "[self.window - 1, 0] if self.window > 0",
        "[self.window, 0] if self.window > 0",
    ),
    FLASH(
        "vllm_flash_gets_odd_pages",
        "FlashAttention gets pages of multiples of 16 tokens",
        PREFILL,
        "return k_cache.shape[1] % _PAGE == 0 and k_cache.dtype in halves",
        "return k_cache.dtype in halves",
    ),
]
