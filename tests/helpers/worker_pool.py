"""Worker processes that are started once and run many distributed tests.

Importing torch and transformers takes 10 to 20 seconds a process, so a fork server imports them once and every worker
is forked from it. Each `run` builds a gloo process group of exactly the size it asks for and destroys it again.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

HEAVY_IMPORTS = [
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    # for the runs of train.py in forked_runs.py, which are forked from the same server
    "accelerate",
    "datasets",
    "deepspeed",
    "torch.optim",
    "torch.nn.parallel",
]
MOST_WORKERS = 8
SECONDS_TO_START = 180.0  # the fork server's first imports, on a busy machine
CONSEQUENCE = "by peer"  # gloo's words when another rank has gone; what that rank says comes first
SECONDS_AFTER_A_FAILURE = 5.0  # how long the other ranks may take to notice that one of them failed


class WorkerError(AssertionError):
    """One or more ranks failed; the text holds their tracebacks."""


class Worker:
    """One process and the pipe to it."""

    def __init__(self, context, stack_file: Path):
        self.stack_file = stack_file
        self.connection, child_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_end, str(stack_file)), daemon=True)
        self.process.start()
        child_end.close()
        self.started = False

    def stack(self) -> str:
        """Where the worker's threads are now, for the message about a hang."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.stack_file.read_text() if self.stack_file.exists() else "(no stack)"

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Runs functions on up to eight worker processes joined by gloo."""

    def __init__(self):
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(HEAVY_IMPORTS)
        self._folder = tempfile.TemporaryDirectory(prefix="worker_pool_")
        self._workers: list[Worker] = []
        self._calls = 0

    def run(self, fn, world_size: int, *args, timeout: float = 120.0) -> list:
        """Calls `fn(rank, world_size, *args)` on ranks 0..world_size-1.

        Args:
            fn: a picklable function at the top level of a module.
            world_size: size of the default process group, 1 to 8.
            args: picklable; every rank gets the same.
            timeout: seconds after which the workers are killed.

        Returns:
            What each rank returned, in the order of ranks.

        Raises:
            WorkerError: a rank raised (with its traceback), died or hung (with its stack).
        """
        if not 1 <= world_size <= MOST_WORKERS:
            raise ValueError(f"world_size={world_size}: the pool holds 1 to {MOST_WORKERS} workers")
        workers = self._ready_workers(world_size)
        self._calls += 1
        store = os.path.join(self._folder.name, f"store_{self._calls}")
        for rank, worker in enumerate(workers):
            worker.connection.send_bytes(pickle.dumps((list(sys.path), rank, world_size, store)))
            worker.connection.send_bytes(pickle.dumps((fn, args)))
        results, failures = self._collect(workers, fn, timeout)
        if failures:
            self._replace(workers)
            raise WorkerError("\n".join(sorted(failures, key=lambda text: CONSEQUENCE in text)))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends every worker."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def _ready_workers(self, count: int) -> list[Worker]:
        while len(self._workers) < count:
            stack_file = Path(self._folder.name, f"stack_{len(self._workers)}_{self._calls}")
            self._workers.append(Worker(self._context, stack_file))
        for worker in self._workers[:count]:
            if not worker.started:
                if not worker.connection.poll(SECONDS_TO_START):
                    raise WorkerError(f"a worker did not start in {SECONDS_TO_START:.0f} s")
                try:
                    worker.connection.recv_bytes()
                except EOFError:
                    raise WorkerError("a worker died while it started; its traceback is on stderr") from None
                worker.started = True
        return self._workers[:count]

    def _collect(self, workers, fn, timeout: float) -> tuple[dict, list[str]]:
        deadline = time.monotonic() + timeout
        pending: dict[Connection, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
        results, failures = {}, []
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failures:
                    failures = [
                        f"rank {rank} of {len(workers)} hung in {fn.__name__}: no answer in {timeout:.0f} s\n"
                        + workers[rank].stack()
                        for rank in pending.values()
                    ]
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    workers[rank].process.join(1)
                    succeeded, value = False, f"process died with exit code {workers[rank].process.exitcode}"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} of {len(workers)} failed in {fn.__name__}:\n{value}")
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
        return results, failures

    def _replace(self, workers) -> None:
        """A worker that took part in a failure may hold a patch or a half-sent message: start afresh."""
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


def _serve(connection: Connection, stack_file: str) -> None:
    """A worker's life: announce itself, then answer calls until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    # No rank may finish, and close its connections, while another still opens its own: gloo fails there.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    with open(stack_file, "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        connection.send_bytes(b"ready")
        while True:
            try:
                path, rank, world_size, store = pickle.loads(connection.recv_bytes())
                sys.path[:] = path
                call = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(pickle.dumps(_answer(call, rank, world_size, store)))


def _answer(call: bytes, rank: int, world_size: int, store: str) -> tuple[bool, object]:
    """Runs one call in a process group of its own: (True, result) or (False, traceback)."""
    import torch.distributed as dist

    try:
        fn, args = pickle.loads(call)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        return True, fn(rank, world_size, *args)
    except BaseException:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
