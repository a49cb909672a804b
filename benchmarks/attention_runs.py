"""Check and time the methods of attention.py."""

import argparse
import functools
import statistics
import time

import torch

from easy_context.kernels import AttentionMask, select_kernel

from .attention_cases import Case
from .peers import AttentionMethod
from .world import Budget, World

LARGEST_ERROR = 0.03  # relative norm against float64; bf16 kernels are near 0.005
Tensors = tuple[torch.Tensor, ...]


def make_inputs(args: argparse.Namespace, world: World, seq_length: int) -> Tensors:
    """Whole q, k, v and dout, random, the same on every rank: `[batch, seq, heads, head_dim]` bf16."""
    generator = torch.Generator(world.device).manual_seed(args.seed + seq_length)
    return tuple(
        torch.randn(
            args.batch_size,
            seq_length,
            heads,
            args.head_dim,
            dtype=torch.bfloat16,
            device=world.device,
            generator=generator,
        )
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    )


def local_inputs(method: AttentionMethod, whole: Tensors) -> tuple[Tensors, torch.Tensor]:
    """Return this rank's q, k and v, which require gradients, and dout, contiguous in the method's layout."""
    parts = [method.shard(tensor) for tensor in whole]
    parts = [(part.transpose(1, 2) if method.heads_first else part).contiguous() for part in parts]
    return tuple(part.requires_grad_() for part in parts[:3]), parts[3]


def run_once(method: AttentionMethod, inputs: Tensors, dout: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of q, k and v."""
    out = method.run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def check(method: AttentionMethod, whole: Tensors, expected: Tensors, world: World) -> dict[str, float]:
    """Relative errors (norm of the difference over all ranks / norm) of out, dq, dk and dv.

    Raises:
        ArithmeticError: one of them is above LARGEST_ERROR, or not a number.
    """
    with method.session():
        results = run_once(method, *local_inputs(method, whole))
    errors = {}
    for name, result, reference in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        result = (result.transpose(1, 2) if method.heads_first else result).double()
        reference = method.shard(reference)
        squares = torch.stack([(result - reference).square().sum(), reference.square().sum()])
        difference, norm = world.total(squares).tolist()
        errors[name] = (difference / norm) ** 0.5
    worst = max(errors.values())
    if not worst < LARGEST_ERROR:  # NaN compares false
        raise ArithmeticError(f"relative error {worst:.3g} against float64 is too large: {errors}")
    return errors


def expected_results(args: argparse.Namespace, whole: Tensors, mask: AttentionMask) -> Tensors:
    """Output and gradients in float64, on this device."""
    q, k, v, dout = (tensor.double() for tensor in whole)
    kernel = select_kernel("reference", q.device, q.dtype, args.head_dim)
    rule = args.head_dim**-0.5, mask
    out, lse = kernel.forward(q, k, v, *rule)
    return out, *kernel.backward(dout, q, k, v, out, lse, *rule)


def build_and_check(cases: list[Case], args: argparse.Namespace, world: World) -> dict[tuple[str, str], dict]:
    """Return each case's method with its errors against float64, or its problem, by (method, kernel)."""
    whole = expected = None
    if args.check_length:
        whole = make_inputs(args, world, args.check_length)
        expected = expected_results(args, whole, AttentionMask(causal=True))
    built = {}
    for case in cases:
        problems = []
        for build in (case.build, case.fallback):
            if build is None:
                continue
            method, problem = world.attempt(build)
            errors = None
            if problem is None and args.check_length and case.checked:
                errors, problem = world.attempt(functools.partial(check, method, whole, expected, world))
            if problem is None:
                break
            problems.append(problem)
        entry = {"method": method, "errors": errors, "problem": problem, "first_problem": (problems or [None])[0]}
        built[case.method, case.kernel] = entry
        state = problem or (f"max relative error {max(errors.values()):.1e}" if errors else "not checked")
        world.say(f"{case.method}, {case.kernel}: {state}")
    return built


class Stopwatch:
    """Marks between pieces of work: CUDA events on a GPU, so that launches may run ahead; else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, []

    def mark(self) -> None:
        """Start the next interval."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        """Milliseconds from each mark to the next; the device must be idle."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [(second - first) * 1000 for first, second in pairs]


def measure(
    method: AttentionMethod, whole: Tensors, args: argparse.Namespace, world: World, seconds: float
) -> dict[str, float]:
    """Median times of forward and backward, the slowest rank's, in about `seconds` seconds."""
    inputs, dout = local_inputs(method, whole)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with method.session():
        run_once(method, inputs, dout)  # compiles and allocates
        world.synchronize()
        start = time.perf_counter()
        run_once(method, inputs, dout)
        world.synchronize()
        one = world.largest(time.perf_counter() - start)
        repeats = max(3, min(args.repeats, int(seconds / one))) if args.repeats > 3 else args.repeats
        watch = Stopwatch(world.device)
        for _ in range(repeats):  # back to back, as layers follow each other: nothing waits for the host
            watch.mark()
            out = method.run(*inputs)
            watch.mark()
            torch.autograd.grad(out, inputs, dout)
            del out
        watch.mark()
        world.synchronize()
    intervals = watch.intervals_ms()
    forward, backward = statistics.median(intervals[::2]), statistics.median(intervals[1::2])
    total = statistics.median(f + b for f, b in zip(intervals[::2], intervals[1::2], strict=True))
    return {
        "forward_ms": world.largest(forward),
        "backward_ms": world.largest(backward),
        "total_ms": world.largest(total),
        "repeats": repeats,
        "extra_memory_gib": world.largest((torch.cuda.max_memory_allocated() - before) / 2**30) if on_gpu else None,
    }


def time_case(
    case: Case, entry: dict, whole: Tensors, budget: Budget, seconds: float, args: argparse.Namespace, world: World
) -> dict:
    """Return the rest of a case's row: its error, times and rates, or a note that says why it has none."""
    if entry["problem"] is not None:
        return {"note": entry["problem"]}
    row = {"error": max(entry["errors"].values()) if entry["errors"] else None, "note": entry["method"].note}
    if (note := budget.overrun()) is not None:
        return row | {"note": note}
    times, problem = world.attempt(functools.partial(measure, entry["method"], whole, args, world, seconds))
    if problem is not None:
        return row | {"note": problem}
    return row | times | rates(times, whole[0], case.devices)


def rates(times: dict[str, float], q: torch.Tensor, devices: int) -> dict[str, float]:
    """Return TFLOP/s on each device from the times of a row with these queries, `[batch, seq, heads, head_dim]`.

    Forward has two matrix products over half of the causal score matrix, backward has five.
    """
    batch, length, heads, head_dim = q.shape
    product = 2 * batch * heads * head_dim * length**2 / 2 / devices
    return {
        "devices": devices,
        "forward_tflops": 2 * product / times["forward_ms"] / 1e9,
        "backward_tflops": 5 * product / times["backward_ms"] / 1e9,
        "tflops_per_gpu": 7 * product / times["total_ms"] / 1e9,
    }


def add_ratios(rows: list[dict]) -> None:
    """Speed relative to the limit and to the two peers, in every row that was measured."""

    def time_of(method: str, kernel: str, seq_length: int) -> float | None:
        key = (method, kernel, seq_length)
        return next((r.get("total_ms") for r in rows if (r["method"], r["kernel"], r["seq_length"]) == key), None)

    for row in rows:
        if "total_ms" not in row or row["method"] == "one GPU":
            continue
        for ratio, method, kernel, parts in (
            ("of_limit", "one GPU", row["kernel"], row["devices"]),
            ("vs_ring_flash_attn", "ring-flash-attn zigzag", "torch_flash", 1),
            ("vs_context_parallel", "context_parallel", "cudnn", 1),
        ):
            other = time_of(method, kernel, row["seq_length"])
            if other is not None:
                row[ratio] = other / parts / row["total_ms"]
