"""Put small faults into a copy of the code, one at a time, and see which of them the tests notice.

    python tools/mutate.py --per-module 3 --seed 1 --output mutants.jsonl
    python tools/mutate.py --modules easy_context/loss.py --per-module 20 --output loss.jsonl
    python tools/mutate.py --again mutants.jsonl --output again.jsonl     # those that went through, with newer tests

Each line of the output is a mutant: file, line, kind, the code before and after, the first test that failed, and
whether it was seen. A mutant that went through is to be read: it is either without effect or a gap in the tests. Only
code that runs on a CPU is of use here. TESTS names the cheap test files of each module; they run in a forked process
with the heavy packages imported, and stop at the first failure.
"""

import argparse
import ast
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch.distributed", "transformers.models.llama.modeling_llama", "datasets", "accelerate", "pytest")
# The test files of each module, without "test_" and ".py", the quickest first.
TESTS = {
    "easy_context/kernels/__init__.py": "kernels",
    "easy_context/kernels/base.py": "kernels kernel_splitting",
    "easy_context/kernels/reference.py": "kernels",
    "easy_context/kernels/merge.py": "accumulation",
    "easy_context/kernels/splitting.py": "kernel_splitting",
    "easy_context/kernels/mask.py": "packed_kernels packed_modes",
    "easy_context/kernels/documents.py": "packed_kernels",
    "easy_context/packing.py": "packed_model",
    "easy_context/modes/base.py": "accumulation attention",
    "easy_context/modes/zigzag_ring_attn.py": "accumulation attention",
    "easy_context/modes/dist_flash_attn.py": "accumulation attention",
    "easy_context/modes/ulysses_attn.py": "accumulation attention",
    "easy_context/modes/usp_attn.py": "accumulation attention",
    "easy_context/attention.py": "attention",
    "easy_context/communication.py": "communication accumulation",
    "easy_context/mesh.py": "mesh",
    "easy_context/loss.py": "loss",
    "easy_context/memory/autocast.py": "tiled_mlp recompute",
    "easy_context/memory/plan.py": "plan",
    "easy_context/memory/forecast.py": "forecast plan_search",
    "easy_context/memory/forward_forecast.py": "forward_forecast",
    "easy_context/memory/plan_search.py": "plan_search",
    "easy_context/memory/projections.py": "memory_plans",
    "easy_context/memory/recompute.py": "recompute memory_plans",
    "easy_context/memory/tiled_forward.py": "tiled_forward scorer",
    "easy_context/memory/tiled_mlp.py": "tiled_mlp",
    "easy_context/memory/offload.py": "offload",
    "easy_context/sequence_parallel.py": "huggingface refusals sequence_parallel",
    "easy_context/huggingface.py": "huggingface refusals sequence_parallel",
    "easy_context/model/adapters.py": "adapters",
    "easy_context/model/config.py": "config",
    "easy_context/model/liger.py": "liger",
    "easy_context/model/tokenizer.py": "tokenizer",
    "easy_context/model/fingerprint.py": "fingerprint",
    "easy_context/training/batches.py": "batches columns",
    "easy_context/data/columns.py": "columns batches",
    "easy_context/data/documents.py": "columns token_rows",
    "easy_context/data/token_rows.py": "token_rows",
    "easy_context/data/datasets.py": "datasets",
    "easy_context/training/accelerator.py": "accelerator train",
    "easy_context/training/optimizer.py": "optimizer train",
    "easy_context/training/launch_settings.py": "launch_settings",
    "easy_context/training/trackers.py": "trackers",
    "easy_context/training/watch/judge.py": "judge",
    "easy_context/training/saving.py": "saving resuming",
    "easy_context/training/checkpoints/resuming.py": "resuming",
    "easy_context/training/metrics.py": "metrics",
    "easy_context/model/weights.py": "weights",
    "easy_context/training/zero_offload.py": "memory_choice",
    "easy_context/training/state_memory.py": "memory_choice planner",
    "easy_context/training/adamw8bit.py": "adamw8bit",
    "easy_context/training/gradient_release.py": "adamw8bit",
    "easy_context/training/memory_choice.py": "memory_choice",
    "easy_context/training/free_memory.py": "free_memory",
    "train.py": "train resuming",
    "easy_context/evaluation/needle/cells.py": "cells needle_run",
    "easy_context/evaluation/needle/needle_task.py": "needle_task needle_run",
    "easy_context/evaluation/memory_check.py": "memory_check",
    "easy_context/evaluation/scorer.py": "scorer perplexity_run needle_run",
    "easy_context/evaluation/journal.py": "journal",
    "easy_context/evaluation/results.py": "results plots",
    "easy_context/evaluation/perplexity/sums.py": "sums perplexity_run",
    "easy_context/evaluation/needle/ruler_tasks.py": "ruler_tasks needle_run",
}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
CPU_NEEDS_NOT = ("device", "non_blocking", "strict")  # keywords that no test on a CPU, with right lengths, can miss
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "len", "float32": "bfloat16"}


def variants(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind, new source) for each fault that can be put in at this node."""

    def changed(**fields) -> str:
        return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))

    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", changed(ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", f"({changed(op=ARITHMETIC[type(op)]())})"
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op):
            yield "arithmetic", changed(op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "and/or", f"({changed(op=ast.And() if isinstance(op, ast.Or) else ast.Or())})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "dropped not or minus", f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield "constant", str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", str(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield "swapped branches", f"({changed(body=orelse, orelse=body)})"
        case ast.Attribute(attr=name) | ast.Name(id=name) if name in NAMES:
            yield "name", changed(**{"attr" if isinstance(node, ast.Attribute) else "id": NAMES[name]})
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield "slice", changed(lower=ast.BinOp(lower, ast.Add(), ast.Constant(1)))
            if upper is not None:
                yield "slice", changed(upper=ast.BinOp(upper, ast.Sub(), ast.Constant(1)))
        case ast.Call(func=func, args=args, keywords=keywords):
            plain = not any(isinstance(x, ast.Starred) for x in args[:2])
            if (
                len(args) > 1
                and plain
                and ast.unparse(func) not in ("min", "max")
                and ast.dump(args[0]) != ast.dump(args[1])
            ):
                yield "swapped arguments", changed(args=[args[1], args[0], *args[2:]])
            if keywords and keywords[-1].arg not in CPU_NEEDS_NOT:
                yield "dropped keyword", changed(keywords=keywords[:-1])
            if ast.unparse(func) == "torch.promote_types":
                yield "dtype", ast.unparse(args[0])
    if isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield))
    ):
        yield "removed statement", "pass"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield "removed statement", "pass"


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs: no texts of messages, no annotations, no decorators."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or (isinstance(tree, ast.Raise) and field == "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from nodes(child)


def mutants_of(module: str) -> list[dict]:
    """All mutants of a module: file, line, kind, where the code is (character offsets), before and after."""
    source = (ROOT / module).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in nodes(ast.parse(source)):
        for kind, after in variants(node):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before = source.encode()[start:end].decode()
            where = {"file": module, "line": node.lineno, "start": start, "end": end}
            found.append({**where, "kind": kind, "before": before, "after": after})
    return found


def choose(module: str, count: int, seed: int) -> list[dict]:
    """`count` mutants of a module, each kind as likely as the others, no two at one place."""
    rng, rest, chosen = random.Random(f"{seed} {module}"), mutants_of(module), []
    while rest and len(chosen) < count:
        kind = rng.choice(sorted({mutant["kind"] for mutant in rest}))
        pick = rng.choice([mutant for mutant in rest if mutant["kind"] == kind])
        rest = [mutant for mutant in rest if mutant["start"] != pick["start"]]
        chosen.append(pick)
    return chosen


def run_tests(copy: Path, module: str, limit: float) -> tuple[bool, str]:
    """Run a module's tests in the copy; (whether all passed, the first failure or what ended them)."""
    log = copy.parent / "pytest.log"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy)
        elsewhere = [p for p in sys.path if Path(p).resolve() != ROOT / "tools"]
        sys.path[:] = [str(copy), str(copy / "tests" / "helpers"), *elsewhere]
        sys.dont_write_bytecode = True
        os.environ["PYTHONPATH"] = str(copy)
        tests = [str(next(ROOT.glob(f"tests/**/test_{name}.py")).relative_to(ROOT)) for name in TESTS[module].split()]
        code = importlib.import_module("pytest").main(["-x", "-q", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(int(code))
    deadline = time.monotonic() + limit
    while (status := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    if status[0] == 0:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return False, f"no end within {limit:.0f} s"
    code = os.waitstatus_to_exitcode(status[1])
    failures = re.findall(r"^(?:FAILED|ERROR) (.*)", log.read_text(), re.MULTILINE)
    return code == 0, failures[0][:200] if failures else f"exit code {code}"


def try_mutant(copy: Path, mutant: dict, limit: float) -> dict:
    """Return the mutant's record, with `seen` and `by`, and restore the copy."""
    path = copy / mutant["file"]
    source = path.read_bytes()
    text = source[: mutant["start"]] + mutant["after"].encode() + source[mutant["end"] :]
    started = time.monotonic()
    path.write_bytes(text)
    try:
        ast.parse(text)
        passed, by = run_tests(copy, mutant["file"], limit)
    finally:
        path.write_bytes(source)
    return {**mutant, "seen": not passed, "by": None if passed else by, "seconds": round(time.monotonic() - started)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=list(TESTS), help="files to put faults into; default: all")
    parser.add_argument("--per-module", type=int, default=3, help="mutants a module")
    parser.add_argument("--seed", type=int, default=1, help="another seed chooses other mutants")
    parser.add_argument("--again", help="an output of this script: try those of its mutants that went through")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds for one mutant's tests; longer counts as seen"
    )
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without any fault first")
    parser.add_argument("--output", required=True, help="JSON lines; mutants that are in it are not tried again")
    args = parser.parse_args()
    if unknown := set(args.modules) - TESTS.keys():
        parser.error(f"--modules {' '.join(sorted(unknown))}: TESTS in tools/mutate.py names no tests for that")
    rounds = itertools.zip_longest(*(choose(module, args.per_module, args.seed) for module in args.modules))
    mutants = [mutant for each in rounds for mutant in each if mutant]  # a run cut short has tried every module
    if args.again:
        old = [json.loads(line) for line in Path(args.again).read_text().splitlines()]
        through = {(m["file"], m["kind"], m["before"], m["after"]) for m in old if not m["seen"]}
        now = [mutant for module in args.modules for mutant in mutants_of(module)]
        mutants = [m for m in now if (m["file"], m["kind"], m["before"], m["after"]) in through]
    if Path(args.output).exists():
        done = [json.loads(line) for line in Path(args.output).read_text().splitlines()]
        mutants = [m for m in mutants if not any(m.items() <= record.items() for record in done)]
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, open(args.output, "a") as output:
        copy = Path(folder, "copy")
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        whole: dict[str, bool] = dict.fromkeys(TESTS.values(), True) if args.unchecked else {}
        for mutant in mutants:
            tests = TESTS[mutant["file"]]
            if tests not in whole:
                whole[tests], by = run_tests(copy, mutant["file"], args.timeout)
                if not whole[tests]:
                    print(f"without any fault, {tests} fail: {by}", flush=True)
            if whole[tests]:
                record = try_mutant(copy, mutant, args.timeout)
                output.write(json.dumps(record) + "\n")
                output.flush()
                print(
                    "seen" if record["seen"] else "WENT THROUGH",
                    *list(record.values())[:2],
                    record["after"],
                    flush=True,
                )


if __name__ == "__main__":
    main()
