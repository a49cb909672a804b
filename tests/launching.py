"""Starts the project's scripts as users do: in processes of their own, on CPUs, offline."""

import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run_python(*words: str) -> subprocess.CompletedProcess:
    """Run Python with these words in the repository, as outside of any launcher."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
