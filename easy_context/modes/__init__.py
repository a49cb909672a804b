"""The parallel modes by name."""

from .base import ParallelMode
from .data_parallel import DataParallel
from .dist_flash_attn import DistFlashAttention
from .ulysses_attn import UlyssesAttention
from .zigzag_ring_attn import ZigzagRingAttention

__all__ = ["MODES", "ParallelMode", "get_mode"]

_MODES: dict[str, ParallelMode] = {
    mode.name: mode for mode in (ZigzagRingAttention(), DistFlashAttention(), UlyssesAttention(), DataParallel())
}
MODES = tuple(_MODES)


def get_mode(name: str) -> ParallelMode:
    """The mode called `name`.

    Raises:
        ValueError: the name is unknown; the message lists MODES.
    """
    if name == "usp_attn":
        raise ValueError(f"seq_algo 'usp_attn' is not there yet; choose one of {', '.join(MODES)}")
    if name not in _MODES:
        raise ValueError(f"seq_algo {name!r} is unknown; choose one of {', '.join(MODES)}")
    return _MODES[name]
