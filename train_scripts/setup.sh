#!/usr/bin/env bash
# Makes .venv in the repository; installs requirements.txt there, and requirements-apart.txt in .venv/apart. Once that is
# done, running it again costs nothing.
#
#   bash train_scripts/setup.sh
#   PYTHON=/path/to/python3.12 bash train_scripts/setup.sh    # another interpreter than the first fitting one
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

fits() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python}; do
    if fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  stop "Python 3.11 or newer is needed, and ${PYTHON:-python3} is $("${PYTHON:-python3}" -V 2>&1 || true)." \
    "Install one and run this again; PYTHON=/path/to/python3.11 bash $0 names it if it is not on the PATH."
}

make_environment() {
  if [ -x .venv/bin/python ] && fits .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    return
  fi
  [ ! -e .venv ] || stop ".venv is there but has no Python 3.11 or newer with pip: remove it and run this again."
  local python
  python=$(find_python)
  echo "== making .venv with $("$python" -V)"
  if ! "$python" -m venv .venv; then
    rm -rf .venv
    stop "$python cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv. Then run this again."
  fi
}

# install WHAT PIP-ARGUMENTS... : pip's words go to the log.
log=.venv/install.log
install() {
  echo "== installing $1"
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "${@:2}" >>"$log" 2>&1
}

# PyPI's torch for Linux brings several GB of CUDA libraries, which a machine without a GPU has no use for.
install_torch() {
  local torch
  torch=$(grep '^torch==' requirements.txt)
  if ! nvidia-smi -L >/dev/null 2>&1; then
    install "$torch+cpu" "$torch+cpu" && return
    echo "   the package index has no such build; asking PyTorch's own"
    install "$torch, CPU build" "$torch" --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 0 && return
    echo "   not reached; taking the one with CUDA, which is large"
  fi
  install "$torch" "$torch" || stop_with_log
}

stop_with_log() {
  tail -n 15 "$log" >&2
  stop "pip failed, its last lines are above and all are in $log." \
    "Check the network and the free space of this disk (about 2 GB, 8 GB with CUDA), then run this again."
}

make_environment
# Other requirements, or the same on a machine that has a GPU now, are installed anew.
stamp=.venv/requirements.installed
wanted="$(cat requirements.txt requirements-apart.txt) $(nvidia-smi -L >/dev/null 2>&1 && echo GPU || echo CPU)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  echo "== requirements.txt is installed in .venv"
  exit
fi
rm -f "$stamp"
: >"$log"
install_torch
install "requirements.txt (some minutes; log: $log)" -r requirements.txt || stop_with_log
rm -rf .venv/apart
install "requirements-apart.txt" --no-deps --target .venv/apart -r requirements-apart.txt || stop_with_log
printf '%s\n' "$wanted" >"$stamp"
