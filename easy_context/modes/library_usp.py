"""usp_attn with yunchang's all-to-all and ring-flash-attn's zigzag ring, to compare with."""

from .library import LibraryMode
from .library_ulysses import LibraryUlysses
from .library_zigzag import LibraryZigzag
from .usp_attn import UspAttention


class LibraryUsp(LibraryMode, UspAttention):
    """yunchang's unified sequence parallelism is the same all-to-all around a copy of the same ring."""

    ring_class = LibraryZigzag
    ulysses_class = LibraryUlysses
