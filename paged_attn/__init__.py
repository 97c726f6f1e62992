"""PagedAttention decode for PyTorch: `torch.ops.paged_attn.*` and their Python fronts."""

from importlib.metadata import PackageNotFoundError, version

from . import _library as _library
from . import _registrations as _registrations
from . import reference as reference
from ._block_manager import BlockManager, OutOfBlocks, UnknownSequence
from .cache_ops import append_kv, copy_blocks, reshape_and_cache, swap_blocks
from .ops import (
    append_decode,
    decode,
    decode_with_lse,
    merge_states,
    set_checks,
    set_early_start,
)

try:
    __version__ = version("paged-attn")
except PackageNotFoundError:  # imported from a source folder that was built in place
    __version__ = "0+unknown"

__all__ = [
    "BlockManager",
    "OutOfBlocks",
    "UnknownSequence",
    "append_decode",
    "append_kv",
    "copy_blocks",
    "decode",
    "decode_with_lse",
    "merge_states",
    "reference",
    "reshape_and_cache",
    "set_checks",
    "set_early_start",
    "swap_blocks",
]
