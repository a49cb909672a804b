#!/usr/bin/env bash
# Stretch SmolLM2-135M-Instruct from a window of 8K tokens to 128K, and evaluate it, on one to eight GPUs.
#
#   TEXTS=texts bash train_scripts/SmolLM2-135M-128K.sh
#   DRY_RUN=1 TEXTS=texts bash train_scripts/SmolLM2-135M-128K.sh      # only print the commands
#
# Training text is the Treasury of David and the World English Bible, half of the rows with facts and questions written
# into them (docs/data.md); Austen's novels in data/haystack only evaluate. Every step is one row, split over all GPUs,
# so that the result does not depend on their number: 6.6 M tokens in rows of 64K, then 6.6 M in rows of 128K.
# The window is lengthened by YaRN's scaling of the rotary embeddings, which left perplexity on the first 8K tokens of
# Emma lower than a raised base did, without its sharper attention (ATTENTION_FACTOR=1): with it, 2.6 M tokens of text in
# rows of 16K brought the first 4K tokens to 27.2 at best, without it to 24.9; the original model has 25.0.
# What finished is skipped when the script runs again. OUTPUT/finished-STEP holds the settings that it was made with, and
# where these are others now, the script stops. Variables:
#   MODEL     model to start from: hub name or folder        (HuggingFaceTB/SmolLM2-135M-Instruct)
#   TEXTS     folder with treasury_of_david.txt and world_english_bible.txt, plain or .gz or .xz   (texts)
#   OUTPUT    where everything goes                          (output/SmolLM2-135M-128K)
#   GPUS      number of GPUs                                 (all)
#   ROPE      what lengthens the window: a scaling of tools/scale_rope.py, or a new base such as 2e7   (yarn)
#   FACTOR    of the scaling, the new window over the old one: 16 is 131,072 tokens                    (16)
#   ATTENTION_FACTOR   of yarn: 1 leaves attention as it was, empty takes YaRN's formula               (1)
#   STAGES    length of rows : steps : learning rate         (65536:100:3e-4 131072:50:2e-4)
#             not tried yet: FACTOR=32 and one stage more, to 256K, STAGES="65536:100:3e-4 131072:50:2e-4 262144:12:1e-4"
#   FACTS RETRIEVAL TEXT_LABELS                              the retrieval rows, see prepare_data.py --help
#   SAMPLES   needle prompts for each length and depth       (4)
#   PYTHON    interpreter                                    (.venv/bin/python if it is there)
set -euo pipefail -f # no file names come from patterns here
cd "$(dirname "$0")/.."

MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
TEXTS=${TEXTS:-texts}
OUTPUT=${OUTPUT:-output/SmolLM2-135M-128K}
GPUS=${GPUS:-$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)}
ROPE=${ROPE:-yarn}
FACTOR=${FACTOR:-16}
ATTENTION_FACTOR=${ATTENTION_FACTOR-1}
STAGES=${STAGES:-"65536:100:3e-4 131072:50:2e-4"}
FACTS=${FACTS:-2}
RETRIEVAL=${RETRIEVAL:-0.5}
TEXT_LABELS=${TEXT_LABELS:-0.1}
SAMPLES=${SAMPLES:-4}
case ${DRY_RUN:-0} in 0 | no | false) DRY_RUN=0 ;; *) DRY_RUN=1 ;; esac
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}

fail() {
    echo "SmolLM2-135M-128K.sh: $*" >&2
    exit 1
}

# Print a command, and run it unless DRY_RUN=1.
run() {
    printf '%q ' "$@"
    echo
    [ "$DRY_RUN" = 1 ] || "$@"
}

# finished NAME SETTINGS: whether step NAME ended well in an earlier run, with these settings; otherwise announce it.
finished() {
    local marker=$OUTPUT/finished-$1
    if [ ! -e "$marker" ]; then
        echo "# $1"
        return 1
    fi
    # Earlier versions of this script left the marker empty.
    if [ -s "$marker" ] && [ "$(< "$marker")" != "$2" ]; then
        fail "$1 in OUTPUT=$OUTPUT was made with other settings; take another OUTPUT, or remove $marker and $OUTPUT/$1 to make it anew
  made with: $(< "$marker")
  now:       $2"
    fi
    echo "# $1: finished earlier"
}

# finish NAME SETTINGS: note that step NAME ended well.
finish() {
    [ "$DRY_RUN" = 1 ] || echo "$2" > "$OUTPUT/finished-$1"
}

find_text() {
    local ending
    for ending in "" .gz .xz .bz2; do
        if [ -e "$TEXTS/$1.txt$ending" ]; then
            echo "$TEXTS/$1.txt$ending"
            return
        fi
    done
    if [ "$DRY_RUN" = 1 ]; then
        echo "$TEXTS/$1.txt" # printed, not read
        return
    fi
    fail "TEXTS=$TEXTS holds no $1.txt (nor .gz, .xz, .bz2). Both texts are in the public domain: C. H. Spurgeon, The \
Treasury of David, and the World English Bible (worldenglish.bible)."
}

# must_match VARIABLE REGULAR-EXPRESSION WHAT
must_match() {
    [[ ${!1} =~ ^($2)$ ]] || fail "$1='${!1}' must be $3"
}

NUMBER='[0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]*\.[0-9]*[1-9][0-9]*'
must_match GPUS '[0-9]+' "a number of GPUs"
must_match SAMPLES '[1-9][0-9]*' "a whole number above 0"
must_match FACTOR '([2-9]|[1-9][0-9]+)(\.[0-9]+)?|1\.[0-9]*[1-9][0-9]*' "a number above 1, such as 16"
must_match ATTENTION_FACTOR "($NUMBER)?" "a number above 0, such as 1, or empty"
must_match FACTS '[0-9]+' "a whole number"
must_match RETRIEVAL '0?\.[0-9]+|0|1' "a share from 0 to 1"
must_match TEXT_LABELS '0?\.[0-9]+|0|1' "a share from 0 to 1"
must_match ROPE 'yarn|llama3|linear|[1-9][0-9]*(\.[0-9]+)?(e[0-9]+)?' "yarn, llama3, linear, or a base such as 2e7"
must_match STAGES '.*[^ ].*' "one or more LENGTH:STEPS:RATE, such as 65536:100:3e-4"
LENGTHS=" "
for STAGE in $STAGES; do
    must_match STAGE "[1-9][0-9]{0,8}:[1-9][0-9]{0,8}:($NUMBER)(e-?[0-9]+)?" "LENGTH:STEPS:RATE in STAGES, such as 65536:100:3e-4"
    [[ $LENGTHS != *" ${STAGE%%:*} "* ]] || fail "STAGES='$STAGES' gives rows of ${STAGE%%:*} twice; join the two stages"
    LENGTHS+="${STAGE%%:*} "
done
TREASURY=$(find_text treasury_of_david)
BIBLE=$(find_text world_english_bible)
if [ "$GPUS" -eq 0 ]; then
    [ "$DRY_RUN" = 1 ] || fail "no GPU found (set GPUS if nvidia-smi is missing); training needs at least one"
    GPUS=1
fi
if [ "$GPUS" -gt 1 ]; then
    MODE=zigzag_ring_attn
    TRAIN_LAUNCH=("$PYTHON" -m accelerate.commands.launch --multi_gpu)
    EVAL_LAUNCH=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS")
else
    MODE=data_parallel
    TRAIN_LAUNCH=("$PYTHON" -m accelerate.commands.launch)
    EVAL_LAUNCH=("$PYTHON")
fi
# 135 M parameters with their optimizer fit any GPU many times over, so nothing is sharded but the row.
TRAIN_LAUNCH+=(--num_processes "$GPUS" --num_machines 1 --mixed_precision bf16 --dynamo_backend no)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
[ "$DRY_RUN" = 1 ] || mkdir -p "$OUTPUT"

# What decides a step: its own settings, and those of the steps that it builds on.
TEXT_SETTINGS="TEXTS=$TEXTS RETRIEVAL=$RETRIEVAL FACTS=$FACTS TEXT_LABELS=$TEXT_LABELS"
START_SETTINGS="MODEL=$MODEL ROPE=$ROPE"
case $ROPE in
    yarn) START_SETTINGS+=" FACTOR=$FACTOR ATTENTION_FACTOR=$ATTENTION_FACTOR" ;;
    [!0-9]*) START_SETTINGS+=" FACTOR=$FACTOR" ;;
esac

# --- Rows: text alone and text with facts, every pass over the two books packed anew.
rows() { # LENGTH STEPS
    local settings="MODEL=$MODEL $TEXT_SETTINGS LENGTH=$1 STEPS=$2"
    finished "rows-$1" "$settings" && return
    run "$PYTHON" prepare_data.py --input "treasury=$TREASURY" "bible=$BIBLE" \
        --document-start '^Psalm [0-9]+ OVERVIEW' --validation-fraction 0.02 \
        --tokenizer "$MODEL" --separator '<|endoftext|>' --seq-length "$1" --train-tokens $(($1 * $2)) \
        --retrieval-fraction "$RETRIEVAL" --retrieval-facts "$FACTS" --retrieval-text-labels "$TEXT_LABELS" \
        --work-dir "$OUTPUT/tokens" --output-dir "$OUTPUT/rows-$1" --overwrite
    finish "rows-$1" "$settings"
}

# --- The starting point. A raised base is a flag of train.py; a scaling is written into the config first.
start() {
    case $ROPE in
        [0-9]*)
            START=$MODEL
            ROPE_FLAGS=(--rope-theta "$ROPE")
            ;;
        *)
            START=$OUTPUT/start
            ROPE_FLAGS=()
            finished start "$START_SETTINGS" && return
            SCALING=(--type "$ROPE" --factor "$FACTOR")
            if [ "$ROPE" = yarn ] && [ -n "$ATTENTION_FACTOR" ]; then
                SCALING+=(--attention-factor "$ATTENTION_FACTOR")
            fi
            [ "$DRY_RUN" = 1 ] || rm -rf "$START" # of a run that was cut off
            run "$PYTHON" tools/scale_rope.py "$MODEL" "$START" "${SCALING[@]}"
            finish start "$START_SETTINGS"
            ;;
    esac
}

train() { # FROM LENGTH STEPS LEARNING_RATE SETTINGS
    finished "train-$2" "$5" && return
    run "${TRAIN_LAUNCH[@]}" train.py --model "$1" --dataset "$OUTPUT/rows-$2/train" \
        --eval-dataset "$OUTPUT/rows-$2/validation" --eval-every "$3" --output-dir "$OUTPUT/model-$2" --overwrite \
        --seq-length "$2" "${ROPE_FLAGS[@]}" --parallel_mode "$MODE" --batch-size 1 --gradient-accumulate-every 1 \
        --max-train-steps "$3" --learning-rate "$4" --warmup-steps 10 --lr-scheduler cosine \
        --gradient-checkpointing full
    finish "train-$2" "$5"
}

needle() { # NAME FINAL LENGTH SETTINGS FLAGS...
    finished "$1" "$4 SAMPLES=$SAMPLES" && return
    run "${EVAL_LAUNCH[@]}" eval_needle.py --model "$2" --min_context_length "$(($3 / 8))" --max_context_length "$3" \
        --context_interval "$(($3 / 8))" --num_samples "$SAMPLES" --output_dir "$OUTPUT/$1" "${@:5}"
    run "$PYTHON" plot.py needle "$OUTPUT/$1/cells.jsonl" --output "$OUTPUT/$1.png"
    finish "$1" "$4 SAMPLES=$SAMPLES"
}

evaluate() { # FINAL LENGTH SETTINGS
    if ! finished perplexity "$3"; then
        run "${EVAL_LAUNCH[@]}" eval_ppl.py --model "$MODEL" --model "$1" --text data/haystack/emma.txt \
            --min-tokens 4096 --max-tokens 196608 --tokens-step 4096 --output-file "$OUTPUT/perplexity.csv"
        run "$PYTHON" plot.py perplexity "$OUTPUT/perplexity.csv" --output "$OUTPUT/perplexity.png"
        finish perplexity "$3"
    fi
    needle needle "$1" "$2" "$3" --depth_interval 0.1
    needle needle-distractors "$1" "$2" "$3" --depth_interval 0.25 --num_distractor 8
    if ! finished needle-original "MODEL=$MODEL SAMPLES=$SAMPLES"; then
        run "${EVAL_LAUNCH[@]}" eval_needle.py --model "$MODEL" --min_context_length 4096 --max_context_length 32768 \
            --depth_interval 0.25 --num_samples "$SAMPLES" --output_dir "$OUTPUT/needle-original"
        finish needle-original "MODEL=$MODEL SAMPLES=$SAMPLES"
    fi
}

for STAGE in $STAGES; do
    IFS=: read -r LENGTH STEPS RATE <<< "$STAGE"
    rows "$LENGTH" "$STEPS"
done
start
FROM=$START
SETTINGS="$START_SETTINGS $TEXT_SETTINGS"
for STAGE in $STAGES; do
    IFS=: read -r LENGTH STEPS RATE <<< "$STAGE"
    SETTINGS+=" STAGE=$STAGE"
    train "$FROM" "$LENGTH" "$STEPS" "$RATE" "$SETTINGS"
    FROM=$OUTPUT/model-$LENGTH
done
evaluate "$FROM" "$LENGTH" "$SETTINGS"
if [ "$DRY_RUN" != 1 ]; then
    echo "the model is $FROM; see perplexity.png, needle.png and the JSON files in $OUTPUT"
fi
