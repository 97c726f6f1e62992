"""What the tests of engines share: where the models are, and a job of the real one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Job, Result

SEED = int(os.environ.get("PAGED_ATTN_TEST_SEED", random.randrange(2**31)))
MODELS = Path(os.environ["PAGED_ATTN_VLLM_MODELS"])
OURS = {"PAGED_ATTN_VLLM_CPU": "1"}
OUR_IMPL = "paged_attn.integrations._vllm_backend.PagedAttnImpl"
OWN_IMPL = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"

RunEngine = Callable[[Job], Result]


def smollm2(prompts: list[list[int]], **options: Any) -> Job:
    """A job of the real model in fp32, whose rounding two kernels may differ in by a few ulp."""
    options = {"dtype": "float32", "max_model_len": 512, **options}
    return Job(str(MODELS / "smollm2"), prompts, max_tokens=20, options=options)
