"""Run train.py for each ZeRO stage and precision in the same processes; torchrun starts it for test_launches.py."""

import json
import os
import sys
from pathlib import Path

from launching import REPOSITORY, undo_training

sys.path.insert(0, str(REPOSITORY))


def main(folder: str, *flags: str) -> None:
    """Train into `folder`/STAGE-PRECISION for stages 0 to 3 in float32 ("no") and bf16."""
    from accelerate.state import PartialState

    import train

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState.destroy_process_group = lambda *_: None  # DeepSpeed keeps its groups for the whole process
    for stage, precision in ((stage, precision) for precision in ("no", "bf16") for stage in range(4)):
        config = Path(folder) / f"stage-{stage}.{os.environ['RANK']}.json"
        config.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config)
        output_dir = str(Path(folder) / f"{stage}-{precision}")
        sys.argv = ["train.py", *flags, "--mixed-precision", precision, "--output-dir", output_dir]
        train.main()
        undo_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
