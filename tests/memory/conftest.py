"""Fixtures of the tests of memory."""

import pytest
from family_models import patched


@pytest.fixture
def one_process():
    """A Llama patched for one process, with the attention kernel for a CPU; yields the mesh."""
    with patched("zigzag_ring_attn", attn_kernel="cpu") as mesh:
        yield mesh
