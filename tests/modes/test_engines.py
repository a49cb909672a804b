"""The library engine on real processes agrees with ours and with float64 attention; what it lacks is refused."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from family_models import family_model, patched, random_rows, sharded_step
from plain_attention import attention_with_gradients, random_inputs, relative_error
from test_gpu_modes import LAYOUTS, run_on_gpus
from test_modes import CAUSAL, Case, errors_of_mode, kernel_limit, random_cases, rings, splitting
from transformers import LlamaConfig

from benchmarks.flash_attn_shim import ensure_flash_attn
from easy_context.mesh import CurrentMesh, Mesh
from easy_context.modes import ENGINES, MODES, build_mode, find_mode
from easy_context.training import arguments
from easy_context.training import checks as argument_checks

LIBRARY_MODES = ("zigzag_ring_attn", "ulysses_attn", "usp_attn")
NAMES = ("out", "dq", "dk", "dv")
LIBRARIES = ("flash_attn", "ring_flash_attn", "yunchang")


@contextlib.contextmanager
def flash_attn_stand_in():
    """PyTorch's kernels under flash-attn's names where flash-attn is missing; workers serve other tests afterwards."""
    before = set(sys.modules)
    ensure_flash_attn()
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in LIBRARIES:
                del sys.modules[name]


def run_engine(engine: str, whole: list[torch.Tensor], case: Case) -> tuple[torch.Tensor, ...]:
    """This rank's shards of out, dq, dk, dv."""
    mesh = CurrentMesh(ring_degree=lambda size: case.ring_degree or rings(case.mode, size))
    mode = build_mode(case.mode, mesh, engine)
    q, k, v, dout = (mode.shard(x).contiguous() for x in whole)
    before = [x.clone() for x in (q, k, v, dout)]
    kernel = mode.select_kernel("auto" if engine == "library" else case.kernel, q.device, case.dtype, case.dim)
    settings = {"scale": case.scale, "mask": CAUSAL, "kernel": kernel}
    out, residuals = mode.forward(q, k, v, **settings)
    gradients = mode.backward(dout, q, k, v, out, residuals, **settings)
    for x, copy in zip((q, k, v, dout), before, strict=True):
        assert torch.equal(x, copy), f"an input was written to: {case}"
    for x, leaf in zip((out, *gradients), (q, q, k, v), strict=True):
        assert x.shape == leaf.shape and x.dtype == case.dtype, f"{x.shape} {x.dtype}: {case}"
    return out, *gradients


def run_both(rank: int, size: int, cases: list[Case]) -> list[dict[str, tuple[torch.Tensor, ...]]]:
    with flash_attn_stand_in():
        return [{engine: run_engine(engine, case.inputs(), case) for engine in ENGINES} for case in cases]


def differences(case: Case, shards: dict[str, list[tuple[torch.Tensor, ...]]]) -> dict[str, float]:
    """Relative norm of the library's results minus ours, over the whole row."""
    unshard = splitting(case.mode, len(shards["library"]), ring_degree=case.ring_degree).unshard
    library, ours = (
        [unshard(list(parts)) for parts in zip(*shards[engine], strict=True)] for engine in ("library", "easy_context")
    )
    return {what: relative_error(*pair) for what, *pair in zip(NAMES, library, ours, strict=True)}


def compare(pool, cases: list[Case], size: int, limits) -> None:
    """`limits(case)` bounds the library's error against float64, and its distance from ours."""
    results = pool.run(run_both, size, cases)
    for i, case in enumerate(cases):
        shards = {engine: [result[i][engine] for result in results] for engine in ENGINES}
        limit = limits(case)
        for kind, errors in (
            ("float64", errors_of_mode(case, shards["library"])),
            ("ours", differences(case, shards)),
        ):
            for what, error in errors.items():
                assert error <= limit[what], f"{what}: {error:.2e} > {limit[what]:.2e} from {kind}: W={size} {case}"


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("name", LIBRARY_MODES)
def test_the_library_agrees_with_ours_and_with_float64(pool, name, size):
    """Equal, grouped and single KV heads. ring-flash-attn sums in float32, and takes it for no input."""
    dtype = torch.float32 if name == "ulysses_attn" else torch.float64
    compare(pool, random_cases(name, size, dtype, seed=700 + size), size, lambda case: dict.fromkeys(NAMES, 1e-5))


def test_both_libraries_together_agree_on_a_grid(pool):
    cases = random_cases("usp_attn", 4, torch.float64, seed=750, ring_degree=2)
    compare(pool, cases, 4, lambda case: dict.fromkeys(NAMES, 1e-5))


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("name", LIBRARY_MODES)
def test_bfloat16_is_as_exact_as_the_kernel(pool, name, size):
    compare(pool, random_cases(name, size, torch.bfloat16, seed=800 + size, lengths=(128, 256)), size, kernel_limit)


def refuse_float32(rank: int, size: int) -> str:
    case = random_cases("zigzag_ring_attn", size, torch.float32, seed=1)[0]
    with flash_attn_stand_in(), pytest.raises(ValueError) as error:
        run_engine("library", case.inputs(), case)
    return str(error.value)


def test_ring_flash_attn_refuses_float32(pool):
    assert all("float32" in message and "bfloat16" in message for message in pool.run(refuse_float32, 2))


def steps_of_both(rank: int, size: int, mode: str, dtype: torch.dtype) -> list[tuple[float, dict[str, torch.Tensor]]]:
    results = []
    with flash_attn_stand_in():
        for engine in ENGINES:
            with patched(mode, attn_engine=engine) as mesh:
                step = sharded_step(mode, mesh, family_model("llama").to(dtype), *random_rows(2, 45))
                results.append((step.loss, step.gradients))
    return results


@pytest.mark.parametrize("name", LIBRARY_MODES)
def test_a_patched_model_learns_the_same(pool, name):
    dtype = torch.float32 if name == "ulysses_attn" else torch.float64
    for (loss, gradients), (library_loss, library_gradients) in pool.run(steps_of_both, 2, name, dtype):
        assert library_loss == pytest.approx(loss, rel=1e-6)
        assert gradients.keys() == library_gradients.keys()
        for parameter, gradient in gradients.items():
            assert relative_error(library_gradients[parameter], gradient) < 1e-5, parameter


def test_the_flag_takes_our_engine_by_default():
    assert arguments.parse_arguments([]).attn_engine == "easy_context"


@pytest.mark.parametrize(
    "engine, mode, kernel, fragments",
    [
        ("ring", "zigzag_ring_attn", "auto", ["attn_engine 'ring'", "easy_context, library"]),
        (
            "library",
            "dist_flash_attn",
            "auto",
            ["seq_algo dist_flash_attn", "ulysses_attn or usp_attn"],
        ),
        ("library", "data_parallel", "auto", ["seq_algo data_parallel", "attn_engine easy_context"]),
        ("library", "ulysses_attn", "cudnn", ["attn_kernel cudnn", "auto or flash_attn"]),
    ],
)
def test_what_the_engine_lacks_is_refused(engine, mode, kernel, fragments):
    with pytest.raises(ValueError) as error:
        find_mode(mode, engine).check_kernel_name(kernel)
    assert all(fragment in str(error.value) for fragment in fragments), error.value


def test_every_other_combination_is_accepted():
    for mode in MODES:
        find_mode(mode).check_kernel_name("cudnn")
    for mode in LIBRARY_MODES:
        for kernel in ("auto", "flash_attn"):
            find_mode(mode, "library").check_kernel_name(kernel)


@pytest.mark.parametrize(
    "missing, mode, install",
    [
        ("flash_attn", "zigzag_ring_attn", "pip install flash-attn"),
        ("flash_attn", "ulysses_attn", "pip install flash-attn"),
        ("ring_flash_attn", "zigzag_ring_attn", "pip install ring-flash-attn==0.1.8"),
        ("yunchang", "ulysses_attn", "pip install yunchang==0.6.4"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, missing, mode, install):
    with flash_attn_stand_in():
        for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, missing, None)  # Python's way to say that a package is not there
        with pytest.raises(ValueError) as error:
            build_mode(mode, Mesh(), "library")
        monkeypatch.undo()
    assert f"{install}" in str(error.value) and "attn_engine library" in str(error.value)


@pytest.mark.parametrize(
    "flags, fragments",
    [
        (["--parallel_mode", "dist_flash_attn"], ["--attn-engine library", "dist_flash_attn"]),
        (["--attn-kernel", "cpu"], ["--attn-kernel cpu", "flash_attn"]),
        ([], ["--attn-engine library", "CUDA", "--attn-engine easy_context"]),
    ],
)
def test_the_flag_checks_refuse_it(monkeypatch, flags, fragments):
    """A CPU is refused here only: where a stand-in serves, as in the tests above, the engine itself works."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = arguments.parse_arguments(["--attn-engine", "library", *flags])
    config = LlamaConfig(hidden_size=32, num_attention_heads=4)
    with flash_attn_stand_in():
        problem = argument_checks.flag_problems(args, config, 1)[0]
    assert all(fragment in problem for fragment in fragments), problem


def test_an_unknown_engine_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        arguments.parse_arguments(["--attn-engine", "ring"])
    assert "--attn-engine" in capsys.readouterr().err


def _gpu_errors(rank, size, device, mode_name):
    """Relative norms gathered over the row: the library from float64, from ours, and the kernel alone from float64."""
    ensure_flash_attn()
    mode, rows = build_mode(mode_name, CurrentMesh(), "library"), []
    for seed, (batch, seq, heads, kv_heads, dim) in enumerate(LAYOUTS):
        case = Case(mode_name, batch, seq, heads, kv_heads, dim, torch.bfloat16, seed, kernel="torch_flash")
        whole = random_inputs(seed, batch, seq, seq, heads, kv_heads, dim, torch.bfloat16, device)
        expected = attention_with_gradients(*whole, case.scale)
        kernel = mode.select_kernel("auto", device, torch.bfloat16, dim)
        out, lse = kernel.forward(*whole[:3], case.scale, CAUSAL)
        alone = (out, *kernel.backward(whole[3], *whole[:3], out, lse, case.scale, CAUSAL))
        library, ours = (run_engine(engine, whole, case) for engine in ("library", "easy_context"))
        for what, *parts, single in zip(NAMES, library, ours, alone, strict=True):
            gathered = []
            for part in parts:
                shards = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
                dist.all_gather(shards, part.contiguous())
                gathered.append(mode.unshard(shards))
            right = getattr(expected, what)
            errors = relative_error(gathered[0], right), relative_error(*gathered), relative_error(single, right)
            rows.append((f"{seed} {what}", *errors))
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("mode", LIBRARY_MODES)
def test_bf16_on_two_gpus_is_within_one_and_a_half_times_the_single_process_error(mode):
    results = run_on_gpus(2, _gpu_errors, mode)[0]
    assert len(results) == len(NAMES) * len(LAYOUTS)
    for name, error, difference, single_error in results:
        assert error <= 1.5 * single_error, (name, error, single_error)
        assert difference <= 1.5 * single_error, (name, difference, single_error)
