"""What fits a long row onto a GPU: recomputation, offloading, tiles."""
