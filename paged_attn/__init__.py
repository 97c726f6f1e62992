"""PagedAttention decode for PyTorch: `torch.ops.paged_attn.*` and their Python fronts."""

from importlib.metadata import PackageNotFoundError, version

from . import _library as _library
from . import reference as reference
from ._block_manager import BlockManager, OutOfBlocks, UnknownSequence
from .ops import decode, decode_with_lse, reshape_and_cache, set_checks

try:
    __version__ = version("paged-attn")
except PackageNotFoundError:  # imported from a source folder that was built in place
    __version__ = "0+unknown"

__all__ = [
    "BlockManager",
    "OutOfBlocks",
    "UnknownSequence",
    "decode",
    "decode_with_lse",
    "reference",
    "reshape_and_cache",
    "set_checks",
]
