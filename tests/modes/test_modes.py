"""Every mode, forward and backward, on real processes, against float64 attention on the whole sequence."""

import dataclasses
import math
import random

import pytest
import torch
import torch.distributed as dist
from plain_attention import attention_with_gradients, random_inputs, relative_error
from transformers import LlamaConfig

from easy_context.kernels import AttentionMask, select_kernel
from easy_context.mesh import CurrentMesh, Mesh
from easy_context.modes import MODES, build_mode, find_mode
from easy_context.modes.base import ParallelMode

WORLD_SIZES = (1, 2, 3, 4, 8)
CAUSAL = AttentionMask(causal=True)
SPLITTING_MODES = tuple(name for name in MODES if name != "data_parallel")


def rings(name: str, size: int) -> int:
    """The ring degree at which tests of all modes run: rings of two in usp_attn where there can be, else 1."""
    return 2 if name == "usp_attn" and size % 2 == 0 else 1


def splitting(name: str, size: int, rank: int = 0, ring_degree: int | None = None) -> ParallelMode:
    """A mode that can only split rows, over `size` ranks as `rank` sees them."""
    ring_degree = ring_degree or rings(name, size)
    return build_mode(name, Mesh(sequence_rank=rank, sequence_size=size, ring_degree=ring_degree))


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem; its text is the repro that a failing test prints."""

    mode: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    seed: int
    kernel: str = "cpu"
    lse_gap: float = 0.0
    ring_degree: int | None = None  # None: as `rings` says

    @property
    def scale(self) -> float:
        return 1.2 * self.dim**-0.5

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v, dout of the whole sequence; with lse_gap, eighths of the keys lie that far apart in score."""
        tensors = random_inputs(
            self.seed, self.batch, self.length, self.length, self.heads, self.kv_heads, self.dim, self.dtype
        )
        if self.lse_gap:
            root = math.sqrt(abs(self.lse_gap) / self.scale)
            rng = random.Random(self.seed)
            tensors[0][..., 0] = math.copysign(root, self.lse_gap)
            for eighth in tensors[1][..., 0].chunk(8, dim=1):
                eighth[:] = root * rng.choice([0, 1])
        return tensors


def current_mode(case: Case) -> ParallelMode:
    """The mode over all processes of the process group."""
    return build_mode(case.mode, CurrentMesh(ring_degree=lambda size: case.ring_degree or rings(case.mode, size)))


def head_counts(
    rng: random.Random, layout: str, name: str, world_size: int, ring_degree: int | None = None
) -> tuple[int, int]:
    """(heads, kv_heads) of a layout; modes with an all-to-all need heads that the ranks can share."""
    kv_heads = {"equal": rng.randint(1, 3), "grouped": rng.randint(2, 4), "single": 1}[layout]
    in_all_to_all = {"ulysses_attn": world_size, "usp_attn": world_size // (ring_degree or rings(name, world_size))}
    shared = in_all_to_all.get(name, 1)
    if layout == "equal":
        return kv_heads * shared, kv_heads * shared
    heads = math.lcm(kv_heads, shared) * rng.randint(1, 2)
    return (heads if heads > kv_heads else 2 * heads), kv_heads


def random_cases(
    name: str,
    world_size: int,
    dtype: torch.dtype,
    seed: int,
    lengths: tuple[int, int] = (1, 96),
    ring_degree: int | None = None,
) -> list[Case]:
    """Batch 1 and 2 for equal, grouped and single KV heads, at random lengths and head sizes."""
    rng, cases = random.Random(seed), []
    for layout in ("equal", "grouped", "single"):
        for batch in (1, 2):
            multiple = splitting(name, world_size).multiple_of
            length = multiple * rng.randint(-(-lengths[0] // multiple), max(1, lengths[1] // multiple))
            heads, kv_heads = head_counts(rng, layout, name, world_size, ring_degree)
            dim = rng.choice([8, 16, 32])
            shape = (batch, length, heads, kv_heads, dim, dtype)
            cases.append(Case(name, *shape, rng.randrange(10**6), ring_degree=ring_degree))
    return cases


def run_case(case: Case) -> tuple[torch.Tensor, ...]:
    """This rank's shards of out, dq, dk, dv."""
    mode = current_mode(case)
    kernel = select_kernel(case.kernel, torch.device("cpu"), case.dtype, case.dim)
    q, k, v, dout = (mode.shard(x).contiguous() for x in case.inputs())
    before = [x.clone() for x in (q, k, v, dout)]
    settings = {"scale": case.scale, "mask": CAUSAL, "kernel": kernel}
    out, residuals = mode.forward(q, k, v, **settings)
    assert isinstance(residuals, tuple) and all(isinstance(x, torch.Tensor) for x in residuals)
    assert torch.isfinite(out).all(), f"out is not finite: {case}"
    kept = [x.clone() for x in (out, *residuals)]
    gradients = mode.backward(dout, q, k, v, out, residuals, **settings)
    for x, copy in zip((q, k, v, dout, out, *residuals), (*before, *kept), strict=True):
        assert torch.equal(x, copy), f"an input was written to: {case}"
    for x, leaf in zip((out, *gradients), (q, q, k, v), strict=True):
        assert x.shape == leaf.shape and x.dtype == case.dtype, f"{x.shape} {x.dtype}: {case}"
    return out, *gradients


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[tuple[torch.Tensor, ...]]:
    return [run_case(case) for case in cases]


def errors_of_mode(case: Case, shards: list[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """Relative norm against float64 of what the ranks hold together."""
    q, k, v, dout = case.inputs()
    expected = attention_with_gradients(q, k, v, dout, case.scale)
    mode = splitting(case.mode, len(shards), ring_degree=case.ring_degree)
    names = ("out", "dq", "dk", "dv")
    whole = {what: mode.unshard([shard[i] for shard in shards]) for i, what in enumerate(names)}
    return {what: relative_error(value, getattr(expected, what)) for what, value in whole.items()}


def errors_of_kernel(case: Case) -> dict[str, float]:
    """The same for the kernel alone on the whole sequence in one process."""
    q, k, v, dout = case.inputs()
    expected = attention_with_gradients(q, k, v, dout, case.scale)
    kernel = select_kernel(case.kernel, torch.device("cpu"), case.dtype, case.dim)
    out, lse = kernel.forward(q, k, v, case.scale, CAUSAL)
    gradients = kernel.backward(dout, q, k, v, out, lse, case.scale, CAUSAL)
    values = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    return {what: relative_error(value, getattr(expected, what)) for what, value in values.items()}


def check(pool, cases: list[Case], world_size: int, limits) -> None:
    """Runs all cases in one call; `limits(case)` gives the largest error of each output."""
    results = pool.run(run_cases, world_size, cases)
    for i, case in enumerate(cases):
        errors, limit = errors_of_mode(case, [result[i] for result in results]), limits(case)
        for what, error in errors.items():
            assert error <= limit[what], f"{what} is off by {error:.2e} > {limit[what]:.2e}: W={world_size} {case}"


def fixed_limit(tolerance: float):
    return lambda case: dict.fromkeys(("out", "dq", "dk", "dv"), tolerance)


def kernel_limit(case: Case) -> dict[str, float]:
    return {what: 1.5 * error for what, error in errors_of_kernel(case).items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_float32_matches_float64(pool, name, world_size):
    cases = random_cases(name, world_size, torch.float32, seed=100 + world_size)
    cases += [dataclasses.replace(cases[2], kernel="reference")]
    check(pool, cases, world_size, fixed_limit(1e-5))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_bfloat16_is_as_exact_as_the_kernel(pool, name, world_size):
    """Rows are long enough for the two errors, both sums of many roundings, to be compared at all."""
    cases = random_cases(name, world_size, torch.bfloat16, seed=200 + world_size, lengths=(128, 256))
    check(pool, cases, world_size, kernel_limit)


@pytest.mark.parametrize("ulysses,ring", [(2, 2), (4, 1), (1, 4), (2, 4), (4, 2)])
def test_usp_matches_float64_at_every_grid(pool, ulysses, ring):
    """Among the heads: one key head, fewer than any Ulysses group has ranks."""
    size = ulysses * ring
    cases = random_cases("usp_attn", size, torch.float32, seed=500 + size, ring_degree=ring)
    check(pool, cases, size, fixed_limit(1e-5))
    cases = random_cases("usp_attn", size, torch.bfloat16, 600 + size, lengths=(128, 256), ring_degree=ring)
    check(pool, cases, size, kernel_limit)


@pytest.mark.parametrize("world_size", (2, 3, 4, 8))
@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_blocks_whose_lse_lie_far_apart_merge(pool, name, world_size):
    """Scores near 200 carry 1e-5 of rounding themselves, which the exponential passes on: hence the wider limit.

    Where the kernel alone is farther off than that, its own error is the measure.
    """
    cases = []
    for seed, gap in enumerate((200.0, -200.0)):
        length = splitting(name, world_size).multiple_of * 4
        heads = 2 * world_size
        shape = (1, length, heads, heads, 16, torch.float32)
        cases.append(Case(name, *shape, seed, kernel="reference", lse_gap=gap))
        cases.append(Case(name, *shape, seed, kernel="cpu", lse_gap=gap))
    check(pool, cases, world_size, lambda case: {what: max(1e-4, error) for what, error in kernel_limit(case).items()})


@pytest.mark.parametrize("name", MODES)
def test_one_process_without_a_group(name):
    assert not dist.is_initialized()
    for case in random_cases(name, 1, torch.float32, seed=300):
        for what, error in errors_of_mode(case, [run_case(case)]).items():
            assert error < 1e-5, f"{what}: {case}"


def refuse_other_masks(rank: int, world_size: int) -> None:
    for name in SPLITTING_MODES:
        mode = build_mode(name, CurrentMesh(ring_degree=lambda size, name=name: rings(name, size)))
        x = torch.zeros(1, 4, 2, 8)
        settings = {"scale": 1.0, "kernel": select_kernel("reference", x.device, x.dtype, 8)}
        with pytest.raises(ValueError, match=f"{name} splits the row.*use data_parallel"):
            mode.forward(x, x, x, mask=AttentionMask(causal=False), **settings)


def test_a_mask_that_a_split_row_cannot_honour_is_refused(pool):
    pool.run(refuse_other_masks, 2)


@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_a_mode_without_a_process_group_only_splits_rows(name):
    mode, x = splitting(name, 4), torch.zeros(1, 8, 4, 8)
    kernel = select_kernel("reference", x.device, x.dtype, 8)
    with pytest.raises(RuntimeError, match="without a process group can only split rows.*CurrentMesh"):
        mode.forward(x, x, x, scale=1.0, mask=CAUSAL, kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_parallel_is_the_local_kernel(pool, dtype):
    """Whatever the rank and the number of processes, each keeps the whole row."""
    cases = random_cases("data_parallel", 1, dtype, seed=400, lengths=(128, 256))
    for shards in pool.run(run_cases, 2, cases):
        for case, shard in zip(cases, shards, strict=True):
            limit = kernel_limit(case)
            assert all(error <= limit[what] for what, error in errors_of_mode(case, [shard]).items()), case


@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_shard_and_unshard_are_inverses(name):
    rng = random.Random(500)
    for world_size in WORLD_SIZES:
        modes = [splitting(name, world_size, rank) for rank in range(world_size)]
        for dim in (0, 1, 2):
            shape = [2, 2, 2]
            shape[dim] = modes[0].multiple_of * rng.randint(1, 4)
            whole = torch.arange(math.prod(shape)).reshape(shape)
            shards = [mode.shard(whole, dim=dim) for mode in modes]
            assert len({shard.shape for shard in shards}) == 1
            assert torch.equal(modes[-1].unshard(shards, dim=dim), whole), (name, world_size, dim)


def test_data_parallel_shards_nothing():
    whole = torch.arange(14).reshape(2, 7)
    for rank in range(3):
        mode = splitting("data_parallel", 3, rank)
        assert mode.multiple_of == 1
        assert torch.equal(mode.shard(whole), whole)


@pytest.mark.parametrize("name", SPLITTING_MODES)
def test_chunk_indices_say_what_shard_does(name):
    for world_size in WORLD_SIZES:
        mode = splitting(name, world_size)
        held = [list(mode.chunk_indices(rank)) for rank in range(world_size)]
        count = sum(len(chunks) for chunks in held)
        assert sorted(sum(held, [])) == list(range(count))
        whole = torch.arange(3 * count)[None]
        chunks = whole.chunk(count, dim=1)
        for rank in range(world_size):
            expected = torch.cat([chunks[index] for index in held[rank]], dim=1)
            assert torch.equal(splitting(name, world_size, rank).shard(whole), expected)


def test_zigzag_gives_an_early_and_a_late_chunk():
    assert splitting("zigzag_ring_attn", 4).chunk_indices(1) == [1, 6]
    assert splitting("dist_flash_attn", 3).chunk_indices(1) == [1]
    assert splitting("dist_flash_attn", 4).chunk_indices(1) == [2, 3]  # halves of a shard, for the shared step


@pytest.mark.parametrize("ulysses,ring", [(2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (3, 2), (3, 1)])
def test_usp_splits_a_row_as_yunchang_does(ulysses, ring):
    """A zigzag over the rings, whose shares are cut evenly over the ranks of each Ulysses group."""
    whole = torch.arange(6 * ulysses * ring)[None]
    chunks = whole.chunk(2 * ring, dim=1)
    for rank in range(ulysses * ring):
        place = rank // ulysses
        of_group = torch.cat((chunks[place], chunks[2 * ring - 1 - place]), dim=1)
        expected = of_group.chunk(ulysses, dim=1)[rank % ulysses]
        assert torch.equal(splitting("usp_attn", ulysses * ring, rank, ring).shard(whole), expected)


@pytest.mark.parametrize(
    "size,ranks_of_node,heads,ring",
    [
        (8, None, None, 1),  # one node: all-to-all over all ranks
        (8, None, 12, 2),  # 4 is the largest number of ranks that shares 12 heads
        (8, 8, 9, 8),
        (16, 8, 32, 2),  # two nodes: all-to-all inside each
        (16, 8, 12, 4),
        (4, 8, 32, 1),  # half a node
        (12, 8, 24, 3),  # one and a half: Ulysses groups of 4 never cross nodes
    ],
)
def test_usp_keeps_all_to_all_inside_a_node_and_divides_the_heads(monkeypatch, size, ranks_of_node, heads, ring):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_of_node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_node))
    assert find_mode("usp_attn").ring_degree(None, size, heads) == ring


def test_a_ring_degree_that_cannot_be_honoured_is_refused():
    assert find_mode("usp_attn").ring_degree(4, 8) == 4
    for requested in (3, 0, 16):
        with pytest.raises(ValueError, match=f"ring_degree {requested} must divide the 8 ranks"):
            find_mode("usp_attn").ring_degree(requested, 8)
    for name in MODES:
        assert find_mode(name).ring_degree(1, 8, 32) in (1, 8)
        if name != "usp_attn":
            with pytest.raises(ValueError, match=f"ring_degree 2 has no meaning with seq_algo {name}"):
                find_mode(name).ring_degree(2, 8)


def test_usp_names_the_ring_degree_for_heads_it_cannot_share():
    with pytest.raises(ValueError, match="cannot split 6 query heads over the 4 ranks.*ring_degree 4"):
        splitting("usp_attn", 8, ring_degree=2).check(llama(6, 2), 64)
    splitting("usp_attn", 8, ring_degree=4).check(llama(6, 2), 64)


def llama(heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=heads * 8, num_attention_heads=heads, num_key_value_heads=kv_heads)


def test_ulysses_names_the_modes_for_heads_it_cannot_share():
    with pytest.raises(ValueError, match="(?s)6.*4") as error:
        splitting("ulysses_attn", 4).check(llama(6, 2), 64)
    assert "zigzag_ring_attn" in str(error.value) and "dist_flash_attn" in str(error.value)
    splitting("ulysses_attn", 3).check(llama(6, 2), 66)
    for name in ("zigzag_ring_attn", "dist_flash_attn"):
        splitting(name, 4).check(llama(6, 1), 64)


@pytest.mark.parametrize("name", MODES)
def test_the_table_of_modes_names_what_its_files_hold(name):
    """The names stand there as text, so that --help need not import PyTorch."""
    assert find_mode(name).name == name


def test_an_unknown_mode_is_named_with_the_valid_ones():
    with pytest.raises(ValueError, match="(?s)ring_of_fire.*zigzag_ring_attn"):
        find_mode("ring_of_fire")
