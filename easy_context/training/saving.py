"""What a run writes into its folder: arguments, metrics, and at the end a plain Hugging Face checkpoint."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from ..common.errors import first_line
from ..common.files import first_free, write_whole
from ..model.adapters import ADAPTER_CONFIG, README, has_adapter, merged, save_adapter
from ..model.tokenizer import load_tokenizer
from .arguments import Arguments
from .checkpoints.files import newest_in
from .refusal import exit_on

_claims: list[IO] = []  # open files, whose locks end with the process
MODEL_CONFIG = "config.json"  # moved last: where it is, the model is whole
METRICS = "metrics.jsonl"
# As save_pretrained names them.
_WEIGHTS = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
)


def is_finished(output_dir: Path) -> bool:
    """Return whether a run has saved its model in `output_dir`."""
    return (output_dir / MODEL_CONFIG).exists()


@exit_on(ValueError)
def prepare_output_dir(accelerator: Any, args: Arguments) -> None:
    """Make the output folder, claim it for this run and write `args.json`; collective."""
    if accelerator.is_main_process:
        output_dir = Path(args.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        claim(output_dir)
        (output_dir / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=2) + "\n")
    accelerator.wait_for_everyone()


def claim(output_dir: Path) -> None:
    """Refuse other processes a folder until this one ends: two runs would overwrite each other's files.

    Raises:
        ValueError: another process has claimed it.
    """
    file = open(output_dir / ".training", "a+")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system without locks
        file.seek(0)
        raise ValueError(
            f"--output-dir {output_dir}: {file.read() or 'another process'} is training into it. Wait for it, stop it "
            "(a killed launcher can leave its workers behind), or choose another folder"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _claims.append(file)


def prepare_metrics(output_dir: Path, step: int) -> None:
    """Make room for the metrics of the steps after `step`.

    A run that goes on keeps the lines up to its checkpoint; later ones are written again. A new run (step 0) keeps an
    earlier run's file under a numbered name.
    """
    metrics = output_dir / METRICS
    if not metrics.exists():
        return
    if step:
        lines = metrics.read_text().splitlines(keepends=True)
        # A killed run may have left half a line.
        kept_lines = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_whole(metrics, "".join(kept_lines))
        return
    kept = first_free(output_dir, "metrics-{}.jsonl")
    metrics.rename(kept)
    print(f"{metrics} of an earlier run is now {kept}")


def save_model(
    accelerator: Any, model: Any, output_dir: str, tokenizer_of: str | None = None, merge: bool = False
) -> None:
    """Save weights (one set of safetensors shards), config and tokenizer so that `from_pretrained(output_dir)` works.

    A LoRA adapter is saved for peft's `PeftModel.from_pretrained(base, output_dir)`, or merged into a plain model.

    Every rank calls it. All files are written into a folder `.saving-model` first, so that a run that dies meanwhile
    leaves an earlier model as it was. Then they are renamed into place, an earlier `config.json` going first and the
    new one coming last: where there is a `config.json`, the model is whole.

    Args:
        accelerator: the Accelerator.
        model: the prepared model.
        output_dir: the folder.
        tokenizer_of: hub name or folder of the model whose tokenizer is saved beside this one, if it has any.
        merge: save a plain model where there is a LoRA adapter; without, the adapter is saved, which peft loads.

    Raises:
        SystemExit: the disk is full, or does not take the files for another reason.
    """
    target, partial = Path(output_dir), Path(output_dir) / ".saving-model"
    state_dict = accelerator.get_state_dict(model)  # a collective; None off rank 0 under ZeRO-3
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _save_weights(accelerator.unwrap_model(model), partial, state_dict, merge)
            if tokenizer_of is not None and (tokenizer := load_tokenizer(tokenizer_of, required=False)):
                tokenizer.save_pretrained(partial)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            sys.exit(
                f"\ntrain.py: the model could not be saved in {output_dir} ({first_line(error)}). {_way_on(target)}"
            )
        _follow_umask(partial)
        (target / MODEL_CONFIG).unlink(missing_ok=True)
        if (target / ADAPTER_CONFIG).exists():
            (target / README).unlink(missing_ok=True)  # it is about the adapter
        for old in target.iterdir():
            if _WEIGHTS.fullmatch(old.name):
                old.unlink()  # shards of another count would be found beside the new ones
        for path in sorted(partial.iterdir(), key=lambda path: path.name == MODEL_CONFIG):
            if (target / path.name).is_dir():  # a tokenizer's chat templates
                shutil.rmtree(target / path.name)
            os.replace(path, target / path.name)
        partial.rmdir()
    accelerator.wait_for_everyone()


def _save_weights(model: Any, folder: Path, state_dict: dict[str, Any], merge: bool) -> None:
    """Save weights and config of a model, or of its adapter."""
    if not has_adapter(model):
        model.save_pretrained(folder, state_dict=state_dict, max_shard_size="5GB")
    elif merge:
        merged(model, state_dict).save_pretrained(folder, max_shard_size="5GB")
    else:
        save_adapter(model, folder, state_dict)


def _way_on(output_dir: Path) -> str:
    saved = newest_in(output_dir)
    if saved is None:
        return "No checkpoint was saved either: make room, and begin again, with --save-minutes"
    return f"Make room, and the same command goes on from {saved}"


def _follow_umask(folder: Path) -> None:
    """Give every file the mode of the config, since safetensors are written for their owner alone."""
    mode = (folder / MODEL_CONFIG).stat().st_mode
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode & 0o777)
