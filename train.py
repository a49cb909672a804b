"""Train a Hugging Face language model on rows of up to millions of tokens, with exact attention.

Each row is split over the processes of a sequence-parallel group. Launch lines that run as they are:

    # one 80 GB GPU, 32K tokens
    accelerate launch --config_file accelerate_configs/single_gpu.yaml train.py --parallel_mode data_parallel \
        --model meta-llama/Llama-2-7b-hf --seq-length 32768 --rope-theta 1e6 --output-dir output/32K

    # eight GPUs, 256K tokens, each row split over all of them
    accelerate launch --config_file accelerate_configs/single_node.yaml train.py --parallel_mode zigzag_ring_attn \
        --model output/32K --seq-length 262144 --rope-theta 25e6 --gradient-accumulate-every 4 --output-dir output/256K

    # the recipes to 256K and 1M tokens
    bash train_scripts/EasyContext-1M-Llama-2-7B.sh

`python train.py --help` lists the flags.
"""

import argparse
import functools
import sys
from pathlib import Path

from easy_context.common.interrupts import stops_in_one_line, what_is_saved
from easy_context.training.arguments import check_arguments, parse_arguments, refusal


def main() -> None:
    args = parse_arguments()
    with stops_in_one_line(what_is_saved(Path(args.output_dir))):
        train(args)


def train(args: argparse.Namespace) -> None:
    """Train as the flags say, from the checks to the saved model."""
    check_arguments(args)  # everything that can be wrong is said here, before anything heavy loads

    import torch
    from accelerate.utils import set_seed

    from easy_context import (
        apply_fused_loss,
        apply_seq_parallel_monkey_patch,
        apply_unsloth_offloaded_gradient_checkpoint_monkey_patch,
        prepare_seq_parallel_inputs,
    )
    from easy_context.loss import IGNORE_INDEX, next_token_targets
    from easy_context.memory.tiled_mlp import apply_tiled_mlp
    from easy_context.model.config import load_config, set_rope_theta
    from easy_context.model.liger import apply_liger, choose_liger
    from easy_context.model.tokenizer import load_tokenizer
    from easy_context.model.weights import load_whole
    from easy_context.training.accelerator import (
        COLLECTIVE_TIMEOUT,
        build_accelerator,
        clip_gradients,
        prepare_training,
    )
    from easy_context.training.batches import describe_lengths, evaluation_batches, load_rows, training_windows
    from easy_context.training.metrics import MetricsLog, StepMeter, count_parameters, count_tokens, flops_per_token
    from easy_context.training.resuming import Checkpoints
    from easy_context.training.saving import prepare_metrics, prepare_output_dir, save_model
    from easy_context.training.zero_offload import choose_offload

    config = load_config(args.model)
    set_rope_theta(config, args.rope_theta, args.seq_length)  # slower rotation: positions beyond the old window fit
    args.liger = choose_liger(args.liger, config)

    accelerator = build_accelerator(args)
    choose_offload(args, config, accelerator)  # what waits in host memory follows from the memory that is there
    set_seed(args.seed)
    device = accelerator.device
    if accelerator.is_main_process:
        prepare_output_dir(args)
    accelerator.wait_for_everyone()

    # --- The model: an unmodified Hugging Face decoder whose attention spans the processes that share a row. ---
    mesh = apply_seq_parallel_monkey_patch(
        args.parallel_mode,
        config.model_type,
        sequence_parallel_size=args.sequence_parallel_size,
        attn_kernel=args.attn_kernel,
        attn_engine=args.attn_engine,
        timeout=COLLECTIVE_TIMEOUT,
    )
    if args.liger:
        apply_liger(config)
    # DeepSpeed keeps float32 master weights beside a bf16 model; plain PyTorch trains float32 weights under autocast.
    in_bf16 = args.mixed_precision == "bf16" and accelerator.state.deepspeed_plugin is not None
    with refusal():
        model = load_whole(args.model, config, torch.bfloat16 if in_bf16 else torch.float32)
    model = apply_fused_loss(model, liger=args.liger)  # the loss without ever holding the logits of all tokens
    if args.gradient_checkpointing != "none":
        apply_unsloth_offloaded_gradient_checkpoint_monkey_patch(
            offload=args.gradient_checkpointing == "offload", keep_attention=args.keep_attention
        )
        model.gradient_checkpointing_enable()
    if args.mlp_tile_size:
        model = apply_tiled_mlp(model, args.mlp_tile_size)
    token_flops = functools.partial(flops_per_token, config, count_parameters(model))
    model, optimizer, scheduler = prepare_training(args, accelerator, model)

    # --- The data: the same rows on every rank of a sequence-parallel group, other rows in other groups. ---
    dataset = load_rows(args.dataset)
    if note := describe_lengths(dataset, args.seq_length):
        accelerator.print(note)
    checkpoints = Checkpoints(accelerator, args, mesh, model, optimizer, scheduler, rows=len(dataset))
    last_step = checkpoints.restore()  # 0 for a new run
    windows = training_windows(dataset, args, mesh, config.vocab_size, first_step=last_step + 1)
    eval_dataset = load_rows(args.eval_dataset, "--eval-dataset") if args.eval_dataset else None
    rows_per_step = args.batch_size * args.gradient_accumulate_every * mesh.data_size
    accelerator.print(
        f"{args.parallel_mode}: {mesh.data_size} data-parallel x {mesh.sequence_size} sequence-parallel processes, "
        f"{rows_per_step} rows of up to {args.seq_length} tokens a step"
    )

    def shard(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of a batch of whole rows; labels are shifted first, so no boundary token is lost."""
        input_ids = batch["input_ids"]
        position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0).expand_as(input_ids)
        targets = next_token_targets(batch["labels"])
        return prepare_seq_parallel_inputs(
            args.parallel_mode, input_ids, position_ids, targets, mesh.sequence_rank, mesh.sequence_size, device
        )

    def forward(part: dict[str, torch.Tensor], num_items: torch.Tensor | int) -> torch.Tensor:
        """The sum of the losses of this rank's targets, divided by `num_items`."""
        return model(
            input_ids=part["local_input_ids"],
            position_ids=part["local_position_ids"],
            shift_labels=part["local_target_ids"],
            num_items_in_batch=num_items,
            use_cache=False,
        ).loss

    @torch.no_grad()
    def evaluate() -> float:
        """Mean loss over every target of the evaluation rows."""
        model.eval()
        total, valid = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        for batch in evaluation_batches(eval_dataset, args, mesh, config.vocab_size):
            part = shard(batch)
            total += forward(part, 1).float()
            valid += (part["local_target_ids"] != IGNORE_INDEX).sum()
        model.train()
        return (accelerator.reduce(total) / accelerator.reduce(valid).clamp(min=1)).item()

    # --- The loop: one accumulation window is one optimizer step. ---
    # DeepSpeed and DDP average gradients over processes, and both divide by the accumulation steps. The loss is already
    # divided by the targets of the whole window on all ranks, so both divisions are undone.
    gradient_scale = accelerator.num_processes * args.gradient_accumulate_every
    if accelerator.is_main_process:
        prepare_metrics(Path(args.output_dir), last_step)
    log = MetricsLog(accelerator, args, last_step)
    meter = StepMeter(device, accelerator.num_processes, token_flops)
    log.progress.watch_layers(model)
    model.train()
    for step in range(last_step + 1, args.max_train_steps + 1):
        parts = [shard(batch) for batch in next(windows)]
        tokens, valid_tokens, row_length = count_tokens(accelerator, mesh, [part["local_target_ids"] for part in parts])
        learning_rate = scheduler.get_last_lr()[0]
        loss = torch.zeros((), device=device)
        for number, part in enumerate(parts, start=1):
            log.progress.start_micro_batch(number, len(parts))
            with accelerator.accumulate(model):
                micro_loss = forward(part, valid_tokens.clamp(min=1))
                accelerator.backward(micro_loss * gradient_scale)
                grad_norm = clip_gradients(accelerator, model, args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                loss += micro_loss.detach()
        scheduler.step()

        loss = accelerator.reduce(loss, reduction="sum").item()
        record = meter.record(step, loss, learning_rate, grad_norm, tokens, int(valid_tokens), row_length)
        if eval_dataset is not None and (step % args.eval_every == 0 or step == args.max_train_steps):
            record["eval_loss"] = evaluate()
            meter.restart()
        log.write(record)
        if not (loss < float("inf") and grad_norm < float("inf")):  # NaN compares false
            accelerator.print(
                f"\nstep {step}: loss {loss}, gradient norm {grad_norm}. Training stopped and saved nothing more; "
                "lower --learning-rate, raise --warmup-steps or look at the rows of this step",
                file=sys.stderr,
            )
            log.close()
            accelerator.wait_for_everyone()  # the launcher ends rank 0 as soon as another exits
            accelerator.state.destroy_process_group()
            sys.exit(1)
        if checkpoints.due(step):
            checkpoints.save(step)
            meter.restart()

    log.close()
    tokenizer = load_tokenizer(args.model, required=False) if accelerator.is_main_process else None
    save_model(accelerator, model, tokenizer, args.output_dir)
    accelerator.print(f"saved the model in {args.output_dir}")
    accelerator.state.destroy_process_group()


if __name__ == "__main__":
    main()
