"""The original's recipes: train.py stage by stage, each from the model of the stage before, with rising RoPE bases.

A few hundred steps after each rise are enough. The needed base grows faster than the length, as 0.0424 x length^1.628
(arXiv 2405.14591): the first stages of a length stay below it, the last has more. Environment variables:

    MODEL           model to start from: hub name or folder
    DATA            rows for all stages, in place of the published datasets
    DRY_RUN=1       print the commands instead of running them
    CONFIG          Accelerate configuration (accelerate_configs/single_node.yaml: eight GPUs of one machine)
    NUM_PROCESSES   processes, in place of CONFIG's number
    OUTPUT          folder of the stages' folders (output)
    SAVE_MINUTES    minutes between checkpoints, from which a stage that was cut off goes on; 0 for none (30)
    EXTRA           more flags for every stage, such as EXTRA="--keep-attention cpu"
"""

import os
import shlex
import shutil
import sys

from .stages import Recipe, setting, words

TRAIN = """accelerate launch --config_file {config} {processes} train.py --model {model} --output-dir {output}/{name}
    --save-minutes {save_minutes} --seq-length {length} --rope-theta {base} --gradient-accumulate-every {batches}
    --max-train-steps {steps} --learning-rate {rate} --dataset {dataset} --seed {seed} --parallel_mode {mode}
    --batch-size {rows} --wandb EasyContext {extra}"""
# rows: of a micro-batch, on each GPU under data_parallel and on all together otherwise; batches: of a step.
LLAMA_2_7B = """
    name               length  base       rows  batches  steps  rate  data     seed  mode
    7B_32K_rope_1M     32768   1000000    1     4        1000   2e-5  short    2022  data_parallel
    7B_64K_rope_5M     65536   5000000    1     2        1000   2e-5  short    2023  data_parallel
    7B_256K_rope_10M   256000  10000000   1     4        500    2e-5  long     2024  zigzag_ring_attn
    7B_256K_rope_25M   256000  25000000   1     4        500    2e-5  long     2025  zigzag_ring_attn
    7B_256K_rope_50M   256000  50000000   1     4        150    2e-5  long     2026  zigzag_ring_attn
    7B_512K_rope_100M  512000  100000000  1     2        300    2e-5  longest  2027  zigzag_ring_attn
    7B_512K_rope_250M  512000  250000000  1     2        90     1e-5  longest  2028  zigzag_ring_attn
"""
DANUBE_2 = """
    name                    length  base       rows  batches  steps  rate  data   seed  mode
    danube2_16K_rope_30K    16000   30000      2     4        400    2e-5  short  2024  data_parallel
    danube2_32K_rope_100K   32000   100000     1     4        400    2e-5  short  2025  data_parallel
    danube2_32K_rope_300K   32000   300000     1     4        400    2e-5  short  2026  data_parallel
    danube2_64K_rope_1M     64000   1000000    1     2        400    2e-5  short  2027  data_parallel
    danube2_64K_rope_2.5M   64000   2500000    1     2        400    2e-5  short  2028  data_parallel
    danube2_64K_rope_5M     64000   5000000    1     2        400    2e-5  short  2029  data_parallel
    danube2_128K_rope_10M   128000  10000000   1     8        300    2e-5  short  2030  zigzag_ring_attn
    danube2_128K_rope_30M   128000  30000000   1     8        200    2e-5  short  2031  zigzag_ring_attn
    danube2_256K_rope_100M  256000  100000000  1     4        200    2e-5  long   2032  zigzag_ring_attn
"""


def train_in_stages(recipe: Recipe, model: str, datasets: dict[str, str], table: str) -> str:
    """Train stage by stage as a table says, whose column "data" names one of the datasets.

    Returns:
        The folder of the last stage's model.
    """
    if not shutil.which("accelerate"):  # the quickstart's environment, and it is not activated
        os.environ["PATH"] = f"{os.getcwd()}/.venv/bin:{os.environ['PATH']}"
    processes = setting("NUM_PROCESSES")
    values = {
        "config": setting("CONFIG", "accelerate_configs/single_node.yaml"),
        "processes": ["--num_processes", processes] if processes else [],
        "save_minutes": setting("SAVE_MINUTES", "30"),
        "extra": shlex.split(setting("EXTRA")),
        "output": recipe.output,
    }
    model = setting("MODEL", model)
    header, *lines = (line.split() for line in table.strip().splitlines())
    for line in lines:
        stage = dict(zip(header, line, strict=True))
        dataset = setting("DATA", datasets[stage["data"]])
        command = words(TRAIN, model=model, dataset=dataset, **stage, **values)
        folder = recipe.output / stage["name"]
        recipe.stage(stage["name"], command, model=folder)
        model = str(folder)
    return model


def llama_2_7b(*arguments: str) -> None:
    """Llama-2-7B to rows of 512K tokens."""
    datasets = {
        "short": "yaofu/slimpajama-per-source-length-upsample",
        "long": "PY007/slimpajama_llama_tokenized_upsample_4096_chunk_256K",
        "longest": "PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M",
    }
    recipe = Recipe("EasyContext-1M-Llama-2-7B.sh", setting("OUTPUT", "output"), arguments)
    model = train_in_stages(recipe, "meta-llama/Llama-2-7b-hf", datasets, LLAMA_2_7B)
    recipe.say(
        "for 1M tokens raise the base without training, as the original does: --rope-theta 1e9 of eval_ppl.py "
        f"and eval_needle.py, or rope_theta 1e9 and max_position_embeddings 1048576 in {model}/config.json"
    )


def danube2(*arguments: str) -> None:
    """h2o-danube2-1.8b to 256K tokens."""
    datasets = {
        "short": "PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_128K",
        "long": "PY007/slimpajama_mistral_tokenized_upsample_4096_chunk_1M",
    }
    recipe = Recipe("EasyContext-256K-danube2.sh", setting("OUTPUT", "output"), arguments)
    train_in_stages(recipe, "h2oai/h2o-danube2-1.8b-base", datasets, DANUBE_2)


if __name__ == "__main__":
    {"llama_2_7b": llama_2_7b, "danube2": danube2}[sys.argv[1]](*sys.argv[2:])
