"""A model of the memory of a forward pass by tiles (`tiled_forward`), by arithmetic alone.

Its formulas list the tensors that are alive at the three moments which can be the peak. Tests compare it with the
tensors that such a pass holds on a CPU; what a kernel takes inside of a call is not in it.
"""

from .forecast import Load, Shape

_CUDNN_ELEMENTS = 2**31  # of q in one call of cuDNN's attention


def forward_memory(shape: Shape, load: Load, ranks: int, tile_size: int, loss_chunk: int) -> dict[str, float]:
    """Return the bytes of one process at the peak of a forward pass without gradients, by part.

    Args:
        shape: of the model.
        load: the tokens of the process; nothing is cached or kept for backward.
        ranks: processes that share a row.
        tile_size: tokens of a tile.
        loss_chunk: tokens whose logits exist at once.

    Returns:
        "weights" of the whole model, "hidden states" with RoPE's tables and what each token has one of, and the work of
        the moment that takes most: "attention", "MLP" or "loss".
    """
    tokens = load.tokens
    tile = min(tokens, tile_size) * load.size * (3 * shape.inner + 2 * shape.hidden)
    work = {
        "attention": _attention_work(shape, load, ranks),
        "MLP": tokens * load.size * shape.query + tile,  # attention's output is read tile by tile
        "loss": min(tokens, loss_chunk) * 2 * 4.0 * shape.vocabulary,  # logits, their logarithmic softmax: float32
    }
    moment = max(work, key=lambda name: work[name])
    return {
        "weights": float(load.size * shape.parameters),
        "hidden states": tokens * (load.size * (shape.hidden + 2 * shape.query // shape.heads) + 4.0 * 8),
        moment: work[moment],
    }


def _attention_work(shape: Shape, load: Load, ranks: int) -> float:
    """Return the bytes of q, k, v, attention's output and log-sum-exp, and of what parts of attention come in."""
    tokens, size = load.tokens, load.size
    log_sums = 4.0 * tokens * shape.heads
    work = tokens * size * (2 * shape.query + 2 * shape.key) + log_sums
    if ranks > 1:
        # Two buffers of keys and values, queries or blocks that travel or are merged, and float32 sums: at most.
        work += tokens * (size * (2 * shape.query + 4 * shape.key) + 4 * shape.query) + log_sums
    elif load.kernel == "cudnn" and tokens * shape.query > _CUDNN_ELEMENTS:
        # A part of the heads at a time: copies of its q, k and v, and its output before it is put into the whole.
        part = _CUDNN_ELEMENTS / (tokens * shape.query)
        work += part * tokens * size * (2 * shape.query + 2 * shape.key)
    return work
