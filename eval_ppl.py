"""Measure perplexity by context length and position, in one forward pass per document.

    python eval_ppl.py -m MODEL --text data/haystack/emma.txt --max-tokens 32768
    python eval_ppl.py -m BEFORE -m AFTER --text emma.txt --min-tokens 4096 --max-tokens 131072 --output-file emma.csv
    torchrun --nproc-per-node 8 eval_ppl.py -m MODEL --tokenized emozilla/proofpile-test-tokenized \
        --dataset-min-tokens 500000 --samples 20 --min-tokens 50000 --max-tokens 500000 --tokens-step 50000

The output is a CSV with one row per model, document and length, a JSON with the means over all tokens by length and by
position, and a picture of the curves. The same command resumes an unfinished run. docs/evaluation.md explains the files
and each number.
"""

import os

from easy_context.common.flags import refusals
from easy_context.common.interrupts import end_on_signals
from easy_context.evaluation.journal import Journal
from easy_context.evaluation.perplexity.arguments import UNFINISHED, parse_arguments


def main(arguments: list[str] | None = None) -> None:
    """Evaluate every model and write the results, or only save tokenised documents."""
    with refusals("eval_ppl.py"):
        args = parse_arguments(arguments)
    journal = Journal(args.output_file.with_suffix(UNFINISHED), "document", "--output-file")
    saved = f"the tokens are not all in {args.save_tokenized}; remove it before you run the same command again"
    with end_on_signals(journal.what_is_saved if args.save_tokenized is None else lambda: saved):
        with refusals("eval_ppl.py"):  # all that can be refused before a model loads
            from easy_context.evaluation import loading
            from easy_context.evaluation.perplexity import run

            first_process = os.environ.get("RANK", "0") == "0"
            if args.save_tokenized is not None:
                if first_process:
                    run.save_tokenized(args)
                return
            jobs, settings = run.prepare(args)
            run.open_journal(args, settings, journal)
        with refusals("eval_ppl.py", (loading.UnusableModel,)), loading.distributed() as device:
            for done, job in enumerate(jobs, start=1):
                with loading.load_scorer(job.name, job.config, args, device, args.aggressive_memory) as scorer:
                    run.measure_documents(args, job, scorer, journal)
                if first_process:  # after each model, so that an interruption loses no finished one
                    run.write_results(args, jobs[:done], journal)
        if first_process:
            journal.remove()


if __name__ == "__main__":
    main()
