"""Train a Hugging Face language model on rows of up to millions of tokens, with exact attention.

Each row is split over the processes of a sequence-parallel group. Launch lines that run as they are:

    # one 80 GB GPU, 32K tokens
    accelerate launch --config_file accelerate_configs/single_gpu.yaml train.py --parallel_mode data_parallel \
        --model meta-llama/Llama-2-7b-hf --seq-length 32768 --rope-theta 1e6 --output-dir output/32K

    # eight GPUs, 256K tokens, each row split over all of them
    accelerate launch --config_file accelerate_configs/single_node.yaml train.py --parallel_mode zigzag_ring_attn \
        --model output/32K --seq-length 262144 --rope-theta 28e6 --gradient-accumulate-every 4 --output-dir output/256K

    # the recipes to 256K and 512K tokens
    bash train_scripts/EasyContext-1M-Llama-2-7B.sh

`python train.py --help` lists the flags.
"""

import functools
import os
from pathlib import Path

from easy_context.common.interrupts import end_on_signals
from easy_context.data.token_rows import UnusableRow
from easy_context.training.arguments import Arguments, parse_arguments
from easy_context.training.checks import check_arguments
from easy_context.training.outcome import what_is_saved
from easy_context.training.refusal import exit_on
from easy_context.training.watch.watch import Watch


def main() -> None:
    args = parse_arguments()
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # tensors of many sizes leave less memory unused between them
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with (
        end_on_signals(what_is_saved(Path(args.output_dir))) as interrupts,
        Watch(args.hang_timeout, interrupts) as watch,  # ends all processes when one fails, freezes or hangs
        exit_on(UnusableRow, "continue"),
    ):
        train(args, watch)


def train(args: Arguments, watch: Watch) -> None:
    """Train as the flags say, from the checks to the saved model."""
    rows, eval_rows = check_arguments(args)  # flags, config, data and local weights, before anything heavy loads

    import torch
    from accelerate.utils import set_seed

    from easy_context import (
        apply_fused_loss,
        apply_seq_parallel_monkey_patch,
        set_rope_theta,
        shard_batch,
    )
    from easy_context.memory.recompute import apply_memory_plan
    from easy_context.model.adapters import add_adapters
    from easy_context.model.config import load_config
    from easy_context.model.liger import apply_liger, choose_liger
    from easy_context.training.accelerator import (
        COLLECTIVE_TIMEOUT,
        build_accelerator,
        clip_and_step,
        load_model,
        prepare,
    )
    from easy_context.training.batches import describe_lengths, evaluation_batches, rows_of_step, training_steps
    from easy_context.training.checkpoints.writing import Checkpoints
    from easy_context.training.memory_choice import choose_memory
    from easy_context.training.metrics import MetricsLog, StepMeter, mean_loss
    from easy_context.training.nonfinite import NonfiniteSteps, nan_unless_finite
    from easy_context.training.optimizer import adamw, set_learning_rate, warmup_then
    from easy_context.training.saving import prepare_output_dir, save_model

    # --- The model: an unmodified Hugging Face decoder whose attention spans the processes that share a row. ---
    config = load_config(args.model)
    set_rope_theta(config, args.rope_theta, args.seq_length)  # the new base, and a window of at least --seq-length
    args.liger = choose_liger(args.liger, config)  # fused layers, where they can be used
    accelerator = build_accelerator(args)
    watch.start(accelerator)
    plan, tile_size = choose_memory(args, config, accelerator)  # what layers keep and ZeRO-3 offloads, by free memory
    set_seed(args.seed)
    prepare_output_dir(accelerator, args)
    mesh = apply_seq_parallel_monkey_patch(
        args.parallel_mode,
        config.model_type,
        sequence_parallel_size=args.sequence_parallel_size,
        ring_degree=args.ring_degree,
        query_heads=config.num_attention_heads,
        attn_kernel=args.attn_kernel,
        attn_engine=args.attn_engine,
        timeout=COLLECTIVE_TIMEOUT,
    )
    if args.liger:
        apply_liger(config)
    model = load_model(args, config, accelerator)  # refuses a checkpoint that lacks a tensor
    model = add_adapters(model, args)  # all weights are trained unless LoRA or --train-only is asked for
    model = apply_fused_loss(model, liger=args.liger)  # the loss without ever holding the logits of all tokens
    model = apply_memory_plan(model, plan, mlp_tile_size=tile_size)  # the rest is recomputed in backward
    optimizer = adamw(model, args, accelerator)  # weight decay on matrices only
    schedule = warmup_then(args)  # the share of --learning-rate at each step
    model, optimizer = prepare(accelerator, model, optimizer, args)

    # --- The data: the same rows on every rank of a sequence-parallel group, other rows in other groups. ---
    if note := describe_lengths(rows, args.seq_length):
        accelerator.print(note)
    checkpoints = Checkpoints(accelerator, args, mesh, model, optimizer, rows, watch)
    last_step = checkpoints.restore()  # 0 for a new run
    batches = training_steps(rows, args, mesh, first_step=last_step + 1)
    accelerator.print(
        f"{args.parallel_mode}: {mesh.data_size} data-parallel x {mesh.sequence_size} sequence-parallel processes, "
        f"rows a step: {args.batch_size * args.gradient_accumulate_every * mesh.data_size}, of up to "
        f"{args.seq_length} tokens"
    )

    def shard(batch: dict) -> dict:
        """Return this rank's part of a batch of complete rows, as keyword arguments of the model."""
        restart = args.document_positions == "restart"
        return shard_batch(args.parallel_mode, **batch, mesh=mesh, device=accelerator.device, restart_positions=restart)

    # --- The loop: one accumulation window is one optimizer step. ---
    # DeepSpeed and DDP average gradients over processes, and both divide by the accumulation steps. The loss is already
    # divided by the targets of the whole window on all ranks, so both divisions are undone.
    gradient_scale = accelerator.num_processes * args.gradient_accumulate_every
    log = MetricsLog(accelerator, args, watch, last_step)
    meter = StepMeter(accelerator, mesh, config, model)
    log.progress.show_layers_of_first_step(model)
    batches = log.progress.reading(batches)
    nonfinite = NonfiniteSteps(accelerator, args, checkpoints, functools.partial(rows_of_step, rows, args, mesh))
    model.train()
    for step in range(last_step + 1, args.max_train_steps + 1):
        shards = [shard(batch) for batch in next(batches)]
        num_targets = meter.count(shards)  # in the whole window, over all ranks
        learning_rate = set_learning_rate(optimizer, args.learning_rate * schedule(step - 1))
        loss = torch.zeros((), device=accelerator.device)
        for number, micro_batch in enumerate(shards, start=1):
            log.progress.start_micro_batch(number, len(shards))
            with accelerator.accumulate(model):
                share = model(**micro_batch, num_items_in_batch=num_targets, use_cache=False).loss
                accelerator.backward(nan_unless_finite(share) * gradient_scale)
                # At the end of a window, and only if the norm is finite. DeepSpeed's backward has done both already.
                grad_norm = clip_and_step(accelerator, model, optimizer, args.max_grad_norm)
                loss += share.detach()

        loss = accelerator.reduce(loss, reduction="sum").item()
        record = meter.record(step, loss, learning_rate, grad_norm)
        nonfinite.check(log, record)  # skips the step or ends the run
        if eval_rows is not None and (step % args.eval_every == 0 or step == args.max_train_steps):
            eval_batches = log.progress.evaluating(evaluation_batches(eval_rows, args, mesh))
            record["eval_loss"] = mean_loss(accelerator, model, map(shard, eval_batches))
            meter.restart()
        log.write(record)
        if checkpoints.due(step):  # by steps, by the clock, or as a signal asks the run to stop
            checkpoints.save(step)
            meter.restart()
        if checkpoints.stopping:
            break

    log.close()
    nonfinite.sum_up()
    checkpoints.close()
    if not checkpoints.stopping:
        save_model(accelerator, model, args.output_dir, tokenizer_of=args.model, merge=args.merge)
        accelerator.print(f"saved the model in {args.output_dir}")
    accelerator.state.destroy_process_group()


if __name__ == "__main__":
    main()
