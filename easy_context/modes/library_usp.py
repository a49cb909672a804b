"""usp_attn with yunchang's all-to-all and ring-flash-attn's zigzag ring, for comparisons."""

from .library import LibraryMode
from .library_ulysses import LibraryUlysses
from .library_zigzag import LibraryZigzag
from .usp_attn import UspAttention


class LibraryUsp(LibraryMode, UspAttention):
    """The equivalent of yunchang's unified sequence parallelism: its all-to-all around the same ring."""

    ring_class = LibraryZigzag
    ulysses_class = LibraryUlysses
