#!/usr/bin/env bash
# Train on one or several nodes under Slurm. The job goes back into the queue, and on from its last checkpoint, until the
# model is saved.
#
#   sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --time 12:00:00 train_scripts/slurm.sh \
#       --model meta-llama/Llama-2-7b-hf --seq-length 524288 --rope-theta 87e6 --save-minutes 60 --output-dir output/512K
#
# The arguments are train.py's. Submit in the repository's folder, which all nodes must see, like the output folder.
# Five minutes before the time limit Slurm sends SIGUSR1; train.py then saves a checkpoint and ends. --save-minutes is for
# what comes without a warning: a node that fails (Slurm requeues the job then), or a run that you cancel and submit anew.
# A run that fails by itself is not requeued.
#   CONFIG   Accelerate configuration (accelerate_configs/single_node.yaml; on several nodes two_node.yaml)
#   PYTHON   interpreter (.venv/bin/python where it is there, else python)
#SBATCH --job-name=easycontext
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

stop() {
  echo "slurm.sh: $*" >&2
  exit 1
}

[ -n "${SLURM_JOB_ID:-}" ] || stop "submit this with sbatch: it reads the nodes and GPUs of a Slurm job"
cd "$SLURM_SUBMIT_DIR"
[ -f train.py ] || stop "$SLURM_SUBMIT_DIR holds no train.py: run sbatch in the repository's folder"

output=./output previous=
for word in "$@"; do
  case $previous in --output[-_]dir) output=$word ;; esac
  case $previous$word in *--resume=none | --resumenone) stop "--resume none would begin anew after each requeue" ;; esac
  case $word in --output[-_]dir=*) output=${word#*=} ;; esac
  previous=$word
done

nodes=$SLURM_JOB_NUM_NODES
gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}
gpus=${gpus##*:} # of h100:8
[ -n "$gpus" ] || stop "this job has no GPUs: ask for them with --gpus-per-node"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
PYTHON=${PYTHON:-$(command -v .venv/bin/python || echo python)}
config=single_node
[ "$nodes" -eq 1 ] || config=two_node
launch=("$PYTHON" -m train_scripts.slurm_node --config_file "${CONFIG:-accelerate_configs/$config.yaml}"
  --num_machines "$nodes" --num_processes "$((nodes * gpus))"
  --main_process_ip "${hosts[0]}" --main_process_port "$((20000 + SLURM_JOB_ID % 20000))")
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it from sbatch

# Checkpoints that a run would go on from: those that are newer than a model.
checkpoints() {
  [ ! -d "$output" ] || find "$output" -maxdepth 1 -name 'checkpoint-*' "$@" | sort
}

is_finished() {
  [ -e "$output/config.json" ] && [ -z "$(checkpoints -newer "$output/config.json")" ]
}

echo "slurm.sh: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on ${hosts[*]}, $gpus GPUs each"
before=$(checkpoints)
srun --kill-on-bad-exit=1 --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 "${launch[@]}" train.py "$@"
if is_finished; then
  echo "slurm.sh: the model is in $output"
elif [ "$(checkpoints)" = "$before" ]; then
  stop "the run ended without a model or a new checkpoint in $output; a longer --time may be needed"
else
  echo "slurm.sh: not finished, back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
