"""Small random models of the supported families, one training step of theirs, and ways to look at it."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from plain_attention import relative_error
from transformers import AutoConfig, AutoModelForCausalLM

import easy_context
from easy_context.kernels import select_kernel
from easy_context.loss import next_token_targets
from easy_context.memory.plan import KEEP_EVERYTHING, parse_memory_plan
from easy_context.memory.recompute import apply_memory_plan
from easy_context.mesh import CurrentMesh

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 97
CHECKPOINTING_SETTINGS = tuple(
    {"offload": offload, "keep_attention": keep} for offload in (True, False) for keep in ("gpu", "cpu", "none")
)


def family_config(family: str, heads: int = 4, kv_heads: int = 2, layers: int = 2, **overrides):
    """Head size 8; weights wide enough that attention is far from uniform."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * 8,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "sliding_window": None,
    }
    if family == "llama":
        del settings["sliding_window"]
    return AutoConfig.for_model(family, **{**settings, **overrides})


def family_model(family: str, attn_implementation: str = "eager", seed: int = 0, **settings):
    """The same float32 weights in every process for one seed; biases, which start at 0, are made random."""
    config = family_config(family, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model.train()


def random_rows(batch: int, length: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[batch, length]` and their already shifted targets, some of them -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    targets = next_token_targets(ids)
    targets[torch.rand(ids.shape, generator=generator) < 0.2] = -100
    return ids, targets


@dataclasses.dataclass
class StepResult:
    """What one step gave: logits `[batch, length, vocab]` of this rank's rows, the loss over all, all gradients."""

    loss: float
    gradients: dict[str, torch.Tensor]
    logits: torch.Tensor | None = None


def plain_step(model, ids: torch.Tensor, targets: torch.Tensor) -> StepResult:
    """Forward and backward on one process, the loss written out here: sum over valid targets over their number."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / (targets != -100).sum()
    loss.backward()
    return StepResult(loss.item(), gradients_of(model), logits.detach())


def sharded_step(
    mode: str, mesh: CurrentMesh, model, ids: torch.Tensor, targets: torch.Tensor, fused=False, counted=True
) -> StepResult:
    """The same step on this rank's rows and shard, gradients averaged over all ranks as DeepSpeed and DDP do it.

    With `fused`, the model is one to which `apply_fused_loss` was applied; else the loss is Hugging Face's, which asks
    for `labels` although it only reads `shift_labels`. Without `counted` the model is not told the number of targets.
    """
    model.zero_grad()
    number_of_valid_targets = (targets != -100).sum()
    rows = slice(mesh.data_rank * len(ids) // mesh.data_size, (mesh.data_rank + 1) * len(ids) // mesh.data_size)
    positions = torch.arange(ids.shape[1])[None]
    part = easy_context.prepare_seq_parallel_inputs(
        mode, ids[rows], positions, targets[rows], mesh.sequence_rank, mesh.sequence_size, "cpu"
    )
    output = model(
        part["local_input_ids"],
        position_ids=part["local_position_ids"],
        shift_labels=part["local_target_ids"],
        num_items_in_batch=number_of_valid_targets if counted else None,
        use_cache=False,
        **({} if fused else {"labels": part["local_target_ids"]}),
    )
    ranks = mesh.sequence_size * mesh.data_size
    (output.loss * ranks).backward()
    loss, gradients = output.loss.detach().double(), gradients_of(model)
    if dist.is_initialized():
        dist.all_reduce(loss)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= ranks
    logits = output.logits
    if logits is not None:
        logits = easy_context.gather_seq_parallel_outputs(mode, logits.detach(), length=ids.shape[1])
    return StepResult(loss.item(), gradients, logits)


def loss_and_gradients(model, rows) -> tuple[torch.Tensor, dict]:
    """Run a model forward and backward on ids and targets [batch, tokens]; return its loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(5)  # for dropout
    ids, targets = rows
    loss = model(ids, labels=targets, shift_labels=targets, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def assert_same_step(
    actual: StepResult, expected: StepResult, tolerance: float, case: str, *, logits: bool = True
) -> None:
    """Loss, all gradients and, if `logits`, the rows' logits that `actual` has are those of `expected`."""
    assert actual.loss == pytest.approx(expected.loss, rel=tolerance), case
    if logits:
        error = relative_error(actual.logits, expected.logits[: len(actual.logits)])
        assert error < tolerance, f"logits are off by {error:.2e}: {case}"
    assert actual.gradients.keys() == expected.gradients.keys(), case
    for name, gradient in expected.gradients.items():
        error = relative_error(actual.gradients[name], gradient)
        assert error < tolerance, f"gradient of {name} is off by {error:.2e}: {case}"


def gradients_of(model) -> dict[str, torch.Tensor]:
    """Copies of the gradients of all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def patched(mode: str, family: str = "llama", **options):
    """The mode applied inside the block, and removed after it whatever happens; usp_attn with rings of two."""
    if mode == "usp_attn" and dist.is_initialized():
        ranks = options.get("sequence_parallel_size") or dist.get_world_size()
        options.setdefault("ring_degree", 2 if ranks % 2 == 0 else 1)
    mesh = easy_context.apply_seq_parallel_monkey_patch(mode, family, **options)
    try:
        yield mesh
    finally:
        easy_context.remove_seq_parallel_monkey_patch()


@contextlib.contextmanager
def checkpointing(model, **settings):
    """The model checkpointed inside the block by a patch that is removed at once, as it only matters when enabling."""
    easy_context.apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(**settings)
    try:
        model.gradient_checkpointing_enable()
    finally:
        easy_context.remove_unsloth_offloaded_gradient_checkpoint_monkey_patch()
    yield model
    model.gradient_checkpointing_disable()


@contextlib.contextmanager
def planned(model, text: str):
    """The model under the memory plan of this text inside the block, without checkpointing after it."""
    apply_memory_plan(model, parse_memory_plan(text, len(model.model.layers)))
    yield model
    apply_memory_plan(model, (KEEP_EVERYTHING,) * len(model.model.layers))


@contextlib.contextmanager
def counted_calls():
    """Counts the calls of the CPU kernel and of the collectives that modes use, by name."""
    kernel = select_kernel("cpu", torch.device("cpu"), torch.float32, 8)
    calls, originals = {}, []

    def count(owner, name):
        original = getattr(owner, name)
        calls[name] = 0
        originals.append((owner, name, vars(owner).get(name)))

        def counting(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counting)

    for owner, name in (
        (kernel, "forward"),
        (kernel, "backward"),
        (dist, "batch_isend_irecv"),
        (dist, "all_to_all_single"),
        (dist, "all_gather"),
    ):
        count(owner, name)
    try:
        yield calls
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def assert_identical(actual: dict, expected: dict, case: str = "") -> None:
    """The same names, and for each the same tensor to the last bit."""
    assert actual.keys() == expected.keys(), case
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), f"{name}: {case}"
