#!/usr/bin/env bash
# Stretch SmolLM2-135M-Instruct from a window of 8K tokens to 128K, and evaluate it, on one to eight GPUs.
#
#   TEXTS=texts bash train_scripts/SmolLM2-135M-128K.sh
#   DRY_RUN=1 bash train_scripts/SmolLM2-135M-128K.sh      # only print the commands
#
# Training text is the Treasury of David and the World English Bible, half of the rows with facts and questions written
# into them (docs/data.md): 6.6 M tokens in rows of 64K, then 6.6 M in rows of 128K. A step is one row, split over all
# GPUs, so the result does not depend on their number. Austen's novels in data/haystack only evaluate, but one of them,
# Emma, chose the RoPE scaling: YaRN beat a raised base on short-context perplexity. Its attention factor is switched
# off: after 2.6 M tokens in rows of 16K, perplexity on Emma's first 4K tokens was 24.9 without it and 27.2 at best with
# it (original model: 25.0).
#
# When the script runs again, finished stages are skipped and a training stage that was cut off goes on from its last
# checkpoint. OUTPUT/finished-STAGE holds the settings that a stage was made with, and the script stops where they are
# others now. Variables and their defaults:
#   MODEL     model to start from: hub name or folder        (HuggingFaceTB/SmolLM2-135M-Instruct)
#   TEXTS     folder with treasury_of_david.txt and world_english_bible.txt, plain or .gz, .xz, .bz2   (texts)
#   OUTPUT    folder of the results                          (output/SmolLM2-135M-128K)
#   GPUS      number of GPUs; all if empty                   ()
#   ROPE      what lengthens the window: a scaling of tools/scale_rope.py, or a new base such as 2e7   (yarn)
#   FACTOR    of the scaling, the new window over the old one: 16 is 131,072 tokens                    (16)
#   ATTENTION_FACTOR   of yarn: 1 leaves attention as it was, empty takes YaRN's formula               (1)
#   STAGES    length of rows : steps : learning rate         (65536:100:3e-4 131072:50:2e-4)
#             Not tried yet: FACTOR=32 and one stage more, to 256K, 262144:12:1e-4.
#   FACTS     --retrieval-facts of prepare_data.py           (2)
#   RETRIEVAL   its --retrieval-fraction                     (0.5)
#   TEXT_LABELS   its --retrieval-text-labels                (0.1)
#   SAMPLES   needle prompts for each length and depth       (4)
#   SAVE_MINUTES   minutes between checkpoints, from which a training stage that was cut off goes on; 0 for none   (30)
#   PYTHON    interpreter; .venv/bin/python where it is there   (python)
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-$(command -v .venv/bin/python || echo python)}
exec "$PYTHON" -m train_scripts.smollm2 "$@"
