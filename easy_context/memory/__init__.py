"""Techniques that make a long row fit on a GPU: recomputation, offloading and tiling."""
