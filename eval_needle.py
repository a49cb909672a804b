"""Run needle in a haystack, or a RULER-like set of tasks, over lengths x depths x samples.

    python eval_needle.py --model MODEL --max_context_length 8192
    torchrun --nproc-per-node 8 eval_needle.py --model MODEL --min_context_length 50000 --max_context_length 1000000 \
        --context_interval 50000 --depth_interval 0.1 --num_samples 5 --num_distractor 7
    python eval_needle.py --model MODEL --task niah_multikey variable_tracking common_words --format chat --few_shot 1

An answer counts if greedy decoding would write it exactly; one forward pass decides that. Each cell is written as soon
as it is finished, and the same command resumes an interrupted run. docs/evaluation.md explains tasks, templates and
files.
"""

from easy_context.common.flags import refusals
from easy_context.common.interrupts import end_on_signals
from easy_context.evaluation.journal import Journal
from easy_context.evaluation.needle.arguments import parse_arguments


def main(arguments: list[str] | None = None) -> None:
    """Score every cell and write the results."""
    with refusals("eval_needle.py"):
        args = parse_arguments(arguments)
    journal = Journal(args.output_dir / "cells.jsonl", "cell", "--output_dir")
    with end_on_signals(journal.what_is_saved):
        with refusals("eval_needle.py"):  # all that can be refused before the model loads
            from easy_context.evaluation import loading
            from easy_context.evaluation.needle import run
            from easy_context.evaluation.needle.prompts import ContextTooShort

            config = loading.load_model_config(args.model, args, args.max_context_length)
            tasks, builder, settings = run.prepare(args, config)
            run.open_journal(args, settings, journal)
        with (
            refusals("eval_needle.py", (loading.UnusableModel, ContextTooShort)),
            loading.distributed() as device,
            loading.load_scorer(args.model, config, args, device) as scorer,
        ):
            records = run.score_cells(args, tasks, builder, scorer, journal)
        if records:  # on the first process
            run.write_results(args, records, settings)


if __name__ == "__main__":
    main()
