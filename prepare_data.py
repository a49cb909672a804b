"""Turn text, JSONL, parquet or hub datasets into packed rows of token ids for train.py.

    python prepare_data.py --input books/ --tokenizer meta-llama/Llama-2-7b-hf --seq-length 65536 --output-dir rows
    python prepare_data.py --input web=web.jsonl books=books.parquet --upsample-long 5 --long-from 4096 \\
        --validation-fraction 0.01 --tokenizer TOKENIZER --seq-length 131072 --output-dir rows
    python prepare_data.py --input hub:emozilla/pg19 --tokenizer TOKENIZER --seq-length 262144 --output-dir rows

Then `train.py --dataset rows/train --eval-dataset rows/validation`. docs/data.md explains formats and packing.
"""

import signal
import sys
from typing import Any

from easy_context.data.preparation.arguments import parse_arguments


def main(arguments: list[str] | None = None) -> None:
    """Check the arguments, prepare the rows and print a summary."""
    options = parse_arguments(arguments)

    from easy_context.data.preparation.pipeline import prepare
    from easy_context.data.preparation.report import describe
    from easy_context.model.tokenizer import load_tokenizer

    report = prepare(
        options.settings,
        load_tokenizer(options.settings.tokenizer, "--tokenizer"),
        options.output_dir,
        workers=options.num_workers,
        work_dir=options.work_dir,
        overwrite=options.overwrite,
    )
    print(describe(report, options.output_dir))


def interrupt(number: int, frame: Any) -> None:
    """Handle a signal: unwind, so that the workers end. The same signal a second time ends this process at once.

    Raises:
        KeyboardInterrupt: with the number of the signal.
    """
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, interrupt)
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_data.py: {error}")
    except KeyboardInterrupt as stop:
        print("\nprepare_data.py: interrupted; run again to continue", file=sys.stderr)
        sys.exit(128 + stop.args[0])
