"""Estimate the memory that a memory plan needs and the time of a step, without running the model.

The formulas list the tensors that are alive at the memory peaks. They were derived from a Llama-3-8B shape on an H200
with Liger's layers; tests compare them with measured peaks and times. The rates are those of an H200.
"""

from dataclasses import dataclass
from typing import Any

from .plan import LayerPlan, MemoryPlan

H200_PEAK = 989e12  # FLOP/s in bfloat16, from its datasheet; times on other cards scale with their peak
MATRIX_RATE = 715e12  # FLOP/s of large matrix products in bfloat16
ATTENTION_RATES = {"flash_attn_4": 613e12, "cudnn": 545e12}  # FLOP/s, causal, forward and backward
OTHER_ATTENTION_RATE = 325e12
MEMORY_RATE = 3.3e12  # bytes/s that elementwise layers read and write
HOST_RATE = 50e9  # bytes/s to or from pinned host memory
EXPOSED_COPIES = 0.16  # share of the copies' time that does not overlap with computation
# Bytes of workspace in attention's backward for each element of q, k and v of one call.
_BACKWARD_WORK = {"flash_attn_4": 8.0}
_OTHER_BACKWARD_WORK = 5.4


@dataclass(frozen=True)
class Memory:
    """Bytes of memory, needed by or free for one process.

    Attributes:
        gpu: bytes on its GPU.
        host: bytes in host memory; free host memory is divided evenly among the processes of a machine.
    """

    gpu: float
    host: float

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(self.gpu + other.gpu, self.host + other.host)

    def fits(self, room: "Memory") -> bool:
        """Return whether both the GPU part and the host part fit into `room`."""
        return self.gpu <= room.gpu and self.host <= room.host


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like decoder that memory and time depend on.

    Attributes:
        hidden, inner: widths of the hidden states and of the MLP.
        query, key: total widths of all query heads and of all key heads.
        heads, key_heads: numbers of query heads and of key heads.
        layers: number of layers.
        vocabulary: number of tokens in the vocabulary.
        tied: whether the output layer shares its weights with the input embedding.
    """

    hidden: int
    inner: int
    query: int
    key: int
    heads: int
    key_heads: int
    layers: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Return the sizes of the model of a Hugging Face config."""
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            query=heads * head_dim,
            key=key_heads * head_dim,
            heads=heads,
            key_heads=key_heads,
            layers=config.num_hidden_layers,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def layer_parameters(self) -> int:
        """The number of weights in one layer's matrices."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.inner)

    @property
    def parameters(self) -> int:
        """The number of weights in all matrices. Tied matrices count once; norms and biases do not count."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Load:
    """The part of a micro-batch that one process computes.

    Attributes:
        tokens: number of local tokens.
        row: number of tokens in a whole row, which several processes may share.
        size: bytes per number: 2 in bfloat16, 4 in float32.
        liger: whether the model uses Liger's layers, which keep fewer tensors.
        kernel: name of the attention kernel.
        mlp_tile_size: tokens in a tile of a recomputed MLP; 0 for untiled MLPs.
        trained_share: fraction of the model's parameters that are trained; frozen parameters have no gradients.
    """

    tokens: int
    row: int
    size: int = 2
    liger: bool = True
    kernel: str = "flash_attn_4"
    mlp_tile_size: int = 0
    trained_share: float = 1.0


@dataclass(frozen=True)
class Peak:
    """The moment of a micro-batch with the highest memory use, not counting weights, gradients and the optimizer.

    Attributes:
        moment: "the loss", or "layer N" for the recomputation and backward of that layer.
        kept: bytes on the GPU that layers keep for their backward, including tensors fetched from the host by then.
        work: bytes that the computation of the loss or the layer needs.
        host: largest number of bytes held in host memory.
    """

    moment: str
    kept: float
    work: float
    host: float

    @property
    def memory(self) -> Memory:
        """The bytes on the GPU and on the host."""
        return Memory(self.kept + self.work, self.host)


def activation_peak(shape: Shape, load: Load, plan: MemoryPlan) -> Peak:
    """Return the peak of a micro-batch under a memory plan."""
    tensors = [_kept_tensors(shape, load, keeps) for keeps in plan]
    on_gpu, on_host = ([sum(layer[place]) for layer in tensors] for place in ("gpu", "cpu"))
    held = sum(on_gpu)
    moments = [Peak("the loss", held, _loss_work(shape, load), sum(on_host))]
    head_gradient = shape.vocabulary * shape.hidden * load.size
    for number in reversed(range(len(plan))):
        held -= on_gpu[number]
        fetched_ahead = on_host[number - 1] if number else 0.0
        work = _layer_work(shape, load, plan[number]) + head_gradient
        moments.append(Peak(f"layer {number + 1}", held + fetched_ahead, work, sum(on_host)))
    return max(moments, key=lambda peak: peak.memory.gpu)


def activation_memory(shape: Shape, load: Load, plan: MemoryPlan) -> Memory:
    """Return the peak memory of a micro-batch, without weights, their gradients and the optimizer."""
    return activation_peak(shape, load, plan).memory


def _kept_tensors(shape: Shape, load: Load, keeps: LayerPlan) -> dict[str, list[float]]:
    """Return the bytes of each tensor that a layer keeps from forward to backward, grouped by place."""
    places: dict[str, list[float]] = {"gpu": [], "cpu": [], "none": []}
    if keeps.everything:
        places["gpu"].append(_narrow_graph(shape, load) + _wide_graph(shape, load, load.tokens))
        return places
    number = load.tokens * load.size
    places[keeps.input].append(number * shape.hidden)
    places[keeps.attention] += [number * shape.query, 4 * load.tokens * shape.heads]
    widths = (shape.query, shape.key, shape.key, shape.hidden, shape.inner, shape.inner)
    places[keeps.projections] += [number * width for width in widths]
    return places


def _narrow_graph(shape: Shape, load: Load) -> float:
    """Return the bytes that autograd saves outside of a layer's MLP: norms, q, k, v and attention's results."""
    in_norms = 4 if load.liger else 7 if load.size == 4 else 9  # Hugging Face's norms compute in float32
    saved = in_norms * shape.hidden + 2 * shape.query + 2 * shape.key
    return load.tokens * (load.size * saved + 4 * shape.heads)


def _wide_graph(shape: Shape, load: Load, tokens: int) -> float:
    """Return the bytes of the intermediate tensors that autograd saves in an MLP."""
    return tokens * load.size * shape.inner * (3 if load.liger else 4)


def _layer_work(shape: Shape, load: Load, keeps: LayerPlan) -> float:
    """Return the peak bytes of a layer's recomputation and backward, including the tensors that the layer kept."""
    tiled = load.mlp_tile_size > 0 and not keeps.everything and keeps.projections == "none"
    mlp_tokens = min(load.tokens, load.mlp_tile_size) if tiled else load.tokens
    hidden = load.tokens * load.size * shape.hidden
    graph = _narrow_graph(shape, load)
    gradients_inside = mlp_tokens * load.size * shape.inner * (1 if load.liger else 3)
    in_mlp = graph + _wide_graph(shape, load, mlp_tokens) + gradients_inside + hidden
    if tiled:
        in_mlp += hidden + 4 * 3 * shape.hidden * shape.inner  # the input's gradient, and the weights' in float32
    # Two gradients now occupy the memory of the second norm and its input. The gradients of attention's output and of
    # q, k and v are added.
    width = shape.query + 2 * shape.key
    heads_at_once = 1.0
    if load.kernel == "flash_attn_4":
        heads_at_once = min(1.0, max(2**28 / (load.tokens * shape.query), 1 / shape.key_heads))
    in_kernel = heads_at_once * load.tokens * width * _BACKWARD_WORK.get(load.kernel, _OTHER_BACKWARD_WORK)
    in_attention = graph + load.tokens * load.size * (shape.query + width) + in_kernel
    made_again = hidden if keeps.input == "none" else 0.0
    return max(in_mlp, in_attention) + made_again


def _loss_work(shape: Shape, load: Load) -> float:
    """Return the peak bytes of the fused loss: the last hidden states, their norm, their gradient, and the head."""
    head = shape.vocabulary * shape.hidden * (4 + load.size)
    logits = max(load.tokens * load.size * shape.hidden, 0.75 * 2**30)
    return 3 * load.tokens * load.size * shape.hidden + head + logits


def micro_batch_seconds(shape: Shape, load: Load, plan: MemoryPlan, peak_flops: float = H200_PEAK) -> float:
    """Return the seconds of forward and backward on a GPU of this peak, without communication and optimizer."""
    matrix = 2 * load.tokens / MATRIX_RATE  # seconds for each weight
    attention = 2 * load.tokens * load.row * shape.query / ATTENTION_RATES.get(load.kernel, OTHER_ATTENTION_RATE)
    elementwise = load.tokens * load.size / MEMORY_RATE
    forward_elementwise = elementwise * (11 * shape.hidden + 3 * shape.inner)
    products = 2 + load.trained_share  # per weight: forward, the input's gradient, the weight's gradient
    layer = products * matrix * shape.layer_parameters + 3.5 * attention
    layer += elementwise * (45 * shape.hidden + 11.5 * shape.inner)
    loss = 1.15 * products * matrix * shape.vocabulary * shape.hidden
    seconds = loss + len(plan) * layer
    down = shape.hidden * shape.inner
    for keeps, after in zip(plan, (*plan[1:], None), strict=True):
        if keeps.everything:
            continue
        runs = 1 if after is None or after.input != "none" else 2
        attention_again = runs * attention if keeps.attention == "none" else 0.0
        products_again = 0 if keeps.projections != "none" else shape.layer_parameters - down
        if runs == 2:
            products_again += shape.layer_parameters
        copied = sum(_kept_tensors(shape, load, keeps)["cpu"])
        seconds += matrix * products_again + attention_again + runs * forward_elementwise
        seconds += 2 * copied / HOST_RATE * EXPOSED_COPIES
    return seconds * H200_PEAK / peak_flops
