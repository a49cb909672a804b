"""The parallel modes by name, and which engine computes them. This module loads no PyTorch, so flags can import it."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..mesh import CurrentMesh, Mesh
    from .base import ParallelMode

# For each engine the modes that it computes: module and class inside this package. A new mode is one more line.
_CLASSES = {
    "easy_context": {
        "zigzag_ring_attn": "zigzag_ring_attn.ZigzagRingAttention",
        "dist_flash_attn": "dist_flash_attn.DistFlashAttention",
        "ulysses_attn": "ulysses_attn.UlyssesAttention",
        "usp_attn": "usp_attn.UspAttention",
        "data_parallel": "data_parallel.DataParallel",
    },
    "library": {
        "zigzag_ring_attn": "library_zigzag.LibraryZigzag",
        "ulysses_attn": "library_ulysses.LibraryUlysses",
        "usp_attn": "library_usp.LibraryUsp",
    },
}
ENGINES = tuple(_CLASSES)
MODES = tuple(_CLASSES["easy_context"])


def find_mode(name: str, engine: str = "easy_context") -> "type[ParallelMode]":
    """Return the class that computes a mode with an engine.

    Args:
        name: one of MODES.
        engine: one of ENGINES. "library" provides zigzag_ring_attn (ring-flash-attn), ulysses_attn (yunchang) and
            usp_attn (both) for comparisons. Rows are split as in our modes, so that only the attention code differs.

    Raises:
        ValueError: the name is unknown, or the engine does not provide the mode.
    """
    if name not in MODES:
        raise ValueError(f"seq_algo {name!r} is unknown; choose one of {', '.join(MODES)}")
    if engine not in ENGINES:
        raise ValueError(f"attn_engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if name not in _CLASSES[engine]:
        raise ValueError(
            f"attn_engine {engine} has no seq_algo {name}: use {' or '.join(_CLASSES[engine])}, or "
            "attn_engine easy_context"
        )
    module, class_name = _CLASSES[engine][name].split(".")
    return getattr(importlib.import_module(f".{module}", __name__), class_name)


def build_mode(name: str, mesh: "CurrentMesh | Mesh", engine: str = "easy_context") -> "ParallelMode":
    """Return a mode over the ranks of `mesh` that share a row. Without a process group it can only split rows.

    Raises:
        ValueError: as for `find_mode`, or if a library of the engine cannot be imported.
    """
    return find_mode(name, engine).over(mesh)
