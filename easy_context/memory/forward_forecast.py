"""Estimate the memory of a tiled forward pass (`tiled_forward`) without running it.

The formulas list the tensors that are alive at the three moments that can be the peak. Tests compare them with the
tensors that such a pass holds on a CPU. Workspace inside a kernel is not included.
"""

from .forecast import Load, Shape

_CUDNN_ELEMENTS = 2**31  # of q in one call of cuDNN's attention


def forward_memory(shape: Shape, load: Load, ranks: int, tile_size: int, loss_chunk: int) -> dict[str, float]:
    """Return the bytes of one process at the peak of a forward pass without gradients, by part.

    Args:
        shape: sizes of the model.
        load: tokens of the process; nothing is cached or kept for backward.
        ranks: number of processes that share a row.
        tile_size: tokens in a tile.
        loss_chunk: number of tokens whose logits exist at once.

    Returns:
        The bytes of "weights" (the whole model), of "hidden states" (with RoPE's tables and the per-token integers),
        and of the stage that needs the most memory: "attention", "MLP" or "loss".
    """
    tokens = load.tokens
    tile = min(tokens, tile_size) * load.size * (3 * shape.inner + 2 * shape.hidden)
    work = {
        "attention": _attention_work(shape, load, ranks),
        "MLP": tokens * load.size * shape.query + tile,  # attention's output is read tile by tile
        "loss": min(tokens, loss_chunk) * 2 * 4.0 * shape.vocabulary,  # float32 logits and their log-softmax
    }
    moment = max(work, key=lambda name: work[name])
    return {
        "weights": float(load.size * shape.parameters),
        "hidden states": tokens * (load.size * (shape.hidden + 2 * shape.query // shape.heads) + 4.0 * 8),
        moment: work[moment],
    }


def _attention_work(shape: Shape, load: Load, ranks: int) -> float:
    """Return the bytes of q, k, v, attention's output and log-sum-exp, and of the buffers for partial attention."""
    tokens, size = load.tokens, load.size
    log_sums = 4.0 * tokens * shape.heads
    work = tokens * size * (2 * shape.query + 2 * shape.key) + log_sums
    if ranks > 1:
        # Upper bound: two buffers of keys and values, queries or blocks in transit or being merged, float32 sums.
        work += tokens * (size * (2 * shape.query + 4 * shape.key) + 4 * shape.query) + log_sums
    elif load.kernel == "cudnn" and tokens * shape.query > _CUDNN_ELEMENTS:
        # cuDNN runs on some heads at a time: copies of their q, k and v, and their output before it is copied.
        part = _CUDNN_ELEMENTS / (tokens * shape.query)
        work += part * tokens * size * (2 * shape.query + 2 * shape.key)
    return work
