# Sourced by the recipes: runs train.py stage by stage, each from the model that the stage before saved.
#
#   DRY_RUN=1   print the commands instead of running them (0, no, false or nothing: run them)
#   CONFIG      Accelerate configuration (default: eight GPUs of one machine)
#   NUM_PROCESSES   overrides the number of processes in CONFIG
#   OUTPUT      folder of the stages' folders (default: output)
#   SAVE_MINUTES   minutes between checkpoints, from which a stage that was cut off goes on (default: 30; 0 for none)
#   EXTRA       more flags for every stage, e.g. EXTRA="--keep-attention cpu"

command -v accelerate > /dev/null || PATH=$PWD/.venv/bin:$PATH # made by the quickstart, and not activated
: "${CONFIG:=accelerate_configs/single_node.yaml}" "${OUTPUT:=output}" "${DRY_RUN:=0}" "${EXTRA:=}" "${SAVE_MINUTES:=30}"
case $DRY_RUN in 0 | no | false) DRY_RUN=0 ;; *) DRY_RUN=1 ;; esac

# stage NAME FLAGS... : train $MODEL into $OUTPUT/NAME, then let MODEL be that; a finished stage is skipped.
stage() {
  local name=$1 target="$OUTPUT/$1"
  shift
  # shellcheck disable=SC2206  # EXTRA is a list of words
  local command=(accelerate launch --config_file "$CONFIG" ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"}
    train.py --model "$MODEL" --output-dir "$target" --save-minutes "$SAVE_MINUTES" "$@" $EXTRA)
  if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "${command[@]}"
    echo
  elif [ -e "$target/config.json" ]; then
    echo "== $name is finished: $target"
  else
    echo "== $name"
    "${command[@]}" || { echo "stage $name failed; run the script again to go on with it" >&2; exit 1; }
  fi
  MODEL=$target
}
