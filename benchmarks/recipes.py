"""The ways to train that train_step.py compares, and how each sets up a model."""

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from easy_context import (
    apply_fused_loss,
    apply_seq_parallel_monkey_patch,
    apply_unsloth_offloaded_gradient_checkpoint_monkey_patch,
    remove_seq_parallel_monkey_patch,
    remove_unsloth_offloaded_gradient_checkpoint_monkey_patch,
)
from easy_context.huggingface import modeling_module
from easy_context.memory.plan import parse_memory_plan, plan_of_flags
from easy_context.memory.recompute import apply_memory_plan
from easy_context.model.liger import apply_liger

from .peers import deepspeed_alst, tile_mlp_as_alst
from .world import World


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    Attributes:
        name: in the table.
        peer: it is not ours.
        mode: how rows are split and, unless `alst`, how attention is computed.
        kernel: of attention.
        liger: Liger's RMSNorm, RoPE and SwiGLU.
        fused_loss: never hold the logits of all tokens.
        checkpointing: "none", "full" (this package's, of layer inputs on the GPU alone) or "hugging_face" (PyTorch's).
        memory_plan: what each layer of ours keeps, see `parse_memory_plan`; None for the peers.
        mlp_tile_size: of this package's tiled MLP; 0 for none.
        alst: attention by DeepSpeed's Ulysses.
        alst_tiled_mlp: DeepSpeed's TiledMLP.
    """

    name: str
    peer: bool
    mode: str
    kernel: str
    liger: bool = True
    fused_loss: bool = True
    checkpointing: str = "full"
    memory_plan: str | None = None
    mlp_tile_size: int = 0
    alst: bool = False
    alst_tiled_mlp: bool = False


def list_recipes(args: argparse.Namespace, world: World) -> list[Recipe]:
    """Return the recipes of --methods in their order; "ours" occurs once for every mode and memory plan."""
    split_mode = "zigzag_ring_attn" if world.size > 1 else "data_parallel"
    flags = itertools.product(args.gradient_checkpointing, args.keep_attention)
    plans = args.memory_plan or dict.fromkeys(str(plan_of_flags(*pair)) for pair in flags)
    ours = [
        Recipe(
            name=f"ours: {mode}, {plan}",
            peer=False,
            mode=mode,
            kernel=args.attn_kernel,
            liger=args.liger,
            checkpointing="none",
            memory_plan=plan,
            mlp_tile_size=args.mlp_tile_size,
        )
        for mode, plan in itertools.product(args.modes or [split_mode], plans)
    ]
    fa2 = "torch_flash" if world.device.type == "cuda" else "auto"
    cudnn = "cudnn" if world.device.type == "cuda" else "auto"
    original = Recipe("original recipe", True, split_mode, fa2, liger=False, fused_loss=False)
    name = "original + Liger" if args.liger else "original + fused loss"
    fused = dataclasses.replace(original, name=name, liger=args.liger, fused_loss=True)
    alst = Recipe("ALST cuDNN", True, "ulysses_attn", cudnn, liger=args.liger, checkpointing="hugging_face", alst=True)
    recipes = {
        "ours": ours,
        "original": [original],
        "original_liger": [fused],
        "alst_cudnn": [alst],
        "alst_fa2": [dataclasses.replace(alst, name="ALST FA2", kernel=fa2)],
        "alst_cudnn_tiled": [dataclasses.replace(alst, name="ALST cuDNN, tiled MLP", alst_tiled_mlp=True)],
    }
    return [recipe for method in args.methods for recipe in recipes[method]]


@contextlib.contextmanager
def applied(recipe: Recipe, config: Any) -> Iterator[Any]:
    """Everything that is global about a recipe, while the block builds and runs its model; undone afterwards.

    Yields:
        the `mpu` for deepspeed.initialize, or None.
    """
    module = modeling_module(config.model_type)
    names = dict(vars(module))
    with contextlib.ExitStack() as stack:
        stack.callback(vars(module).update, names)  # Liger's replacements have no switch to undo them
        if recipe.liger:
            apply_liger(config)
        if recipe.checkpointing == "full":
            apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(offload=False, keep_attention="none")
            stack.callback(remove_unsloth_offloaded_gradient_checkpoint_monkey_patch)
        mpu = None
        if recipe.alst:
            mpu = stack.enter_context(deepspeed_alst(recipe.kernel, config))
        else:
            apply_seq_parallel_monkey_patch(recipe.mode, config.model_type, attn_kernel=recipe.kernel)
            stack.callback(remove_seq_parallel_monkey_patch)
        yield mpu


def build_model(recipe: Recipe, config: Any, device: torch.device, seed: int) -> torch.nn.Module:
    """Return a model on `device` with random bf16 weights, which are the same for every recipe."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if recipe.fused_loss:
        model = apply_fused_loss(model, liger=recipe.liger)
    if recipe.checkpointing == "hugging_face":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif recipe.checkpointing != "none":
        model.gradient_checkpointing_enable()
    if recipe.memory_plan is not None:
        plan = parse_memory_plan(recipe.memory_plan, model.config.num_hidden_layers)
        model = apply_memory_plan(model, plan, mlp_tile_size=recipe.mlp_tile_size)
    if recipe.alst_tiled_mlp:
        tile_mlp_as_alst(model)
    return model.train()
