"""Every way to divide a stage among ranks, with what each needs and how fast it is estimated to be. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_lite.config.check import violations
from megatron_lite.config.layout_rules import LAYOUT_RULES
from megatron_lite.config.rules import rows_divide_among_ranks
from megatron_lite.config.schema import Parallel, Recipe, Stage
from megatron_lite.config.stages import for_stage
from megatron_lite.config.violation import StageView
from megatron_lite.errors import ConfigError, require
from megatron_lite.models.placement import Chunk, place
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.schedule import bubble
from megatron_lite.plan.devices import Device
from megatron_lite.plan.division import BlockSizes, PipelineRank, block_sizes, divide, hold, kinds, live_blocks
from megatron_lite.plan.flops import flops_per_token
from megatron_lite.plan.memory import Memory, rank_memory
from megatron_lite.plan.speed import StepTime, step_time

FREE = 0.05  # share of a device's memory left to its driver, NCCL's buffers and fragments
RULES = (*LAYOUT_RULES, rows_divide_among_ranks)
RECOMPUTE = ("none", "selective", "full")


class Layout(NamedTuple):
    """One that can run."""

    parallel: Parallel
    micro_batch: int
    grid: Grid
    fullest: int  # pp rank that needs most memory
    memory: Memory  # of that one
    time: StepTime
    bubble: float
    tokens_per_s: float  # of all ranks
    mfu: tuple[float, float]  # share of the peak, in both conventions of plan/flops.py


class Rejected(NamedTuple):
    """One that cannot."""

    parallel: Parallel
    micro_batch: int
    reason: str  # of how many others too
    message: str  # with its numbers
    over: float = 0.0  # bytes beyond what there is


def search(recipe: Recipe, index: int, world: int, device: Device) -> tuple[list[Layout], list[Rejected]]:
    """All layouts of stage `index` (from 0) on `world` devices: those that can run, fastest first, and the rest.

    What the recipe says of cp_attention and the overlaps stays. Errors: ConfigError with what is wrong with the recipe
    whatever the layout is.
    """
    require(world >= 1, f"world size {world} is below 1")
    merged = for_stage(recipe, index)
    model, zero = merged.model, merged.optimizer.zero
    plain = _with(merged, index, Parallel(), merged.stages[index].micro_batch)
    if wrong := [violation.message for violation in violations(plain, 1, index)]:
        raise ConfigError("\n  - ".join([f"stage {index + 1} cannot be planned:", *wrong]))
    flops = flops_per_token(model, plain.stages[index].seq_len)
    size = 2 if recipe.precision == "bf16" else 4
    usable = device.memory * (1 - FREE)
    blocks: dict[int, BlockSizes] = {}
    places: dict[tuple[int, int], tuple[tuple[Chunk, ...], ...]] = {}
    recipes: dict[int, Recipe] = {}
    held: dict[tuple[int, int, int, int], tuple[PipelineRank, ...]] = {}
    alive: dict[tuple[int, int, tuple[int, ...], int], int] = {}
    fit, rejected = [], []
    for parallel, stage in _choices(merged, index, world):
        if stage.micro_batch not in recipes:
            recipes[stage.micro_batch] = _with(plain, index, Parallel(), stage.micro_batch)
        view = StageView(index, recipes[stage.micro_batch], model, parallel, world)
        broken = next(((rule.__name__, found.message) for rule in RULES for found in rule(view)), None)
        if broken is not None:
            rejected.append(Rejected(parallel, stage.micro_batch, broken[0].replace("_", " "), broken[1]))
            continue
        grid = Grid(world, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep)
        division = divide(stage, parallel, grid, size)
        key = (parallel.tp, parallel.ep, parallel.pp, parallel.virtual_stages)
        if key not in held:
            if parallel.tp not in blocks:
                blocks[parallel.tp] = block_sizes(model, parallel.tp)
            if key[2:] not in places:
                places[key[2:]] = place(model, parallel.pp, parallel.virtual_stages)
            held[key] = hold(model, parallel, places[key[2:]], blocks[parallel.tp])
        ranks = held[key]
        needs = {}
        for at, _ in kinds(ranks):
            same = (parallel.pp, at.rank, at.chunks, division.micro_batches)
            if same not in alive:
                alive[same] = live_blocks(parallel.pp, at, division.micro_batches)
            needs[at.rank] = rank_memory(model, parallel, division, at, zero=zero, alive=alive[same])
        fullest = max(needs, key=lambda rank: needs[rank].total)
        memory = needs[fullest]
        if memory.total > usable:
            where = f" on pp rank {fullest}" if parallel.pp > 1 else ""
            message = f"{memory.total / 1e9:,.1f} GB{where} of {usable / 1e9:,.1f} GB that can be used"
            rejected.append(Rejected(parallel, stage.micro_batch, "too little memory", message, memory.total - usable))
            continue
        time = step_time(model, parallel, division, ranks, grid, device, seq_len=stage.seq_len, zero=zero)
        speed = stage.batch_tokens / time.total
        fit.append(
            Layout(
                parallel=parallel,
                micro_batch=stage.micro_batch,
                grid=grid,
                fullest=fullest,
                memory=memory,
                time=time,
                bubble=bubble(parallel.pp, parallel.virtual_stages, division.micro_batches),
                tokens_per_s=speed,
                mfu=(speed * flops.full / (world * device.peak), speed * flops.causal / (world * device.peak)),
            )
        )
    return sorted(fit, key=lambda layout: (-layout.tokens_per_s, layout.memory.total)), rejected


def recipe_with(recipe: Recipe, index: int, layout: Layout, world: int) -> Recipe:
    """The recipe with a layout for stage `index`."""
    parallel = layout.parallel.model_copy(update={"world_size": world})
    return _with(recipe, index, parallel, layout.micro_batch)


def _with(recipe: Recipe, index: int, parallel: Parallel, micro_batch: int) -> Recipe:
    stage = recipe.stages[index].model_copy(update={"micro_batch": micro_batch, "parallel": {}})
    stages = (*recipe.stages[:index], stage, *recipe.stages[index + 1 :])
    return recipe.model_copy(update={"parallel": parallel, "stages": stages})


def _choices(recipe: Recipe, index: int, world: int) -> Iterator[tuple[Parallel, Stage]]:
    """Sizes whose product divides the world, and for each of them every micro-batch and way to save memory."""
    stage, layers, experts = recipe.stages[index], recipe.model.num_hidden_layers, recipe.model.num_experts
    sizes = _divisors(world)
    stages: dict[int, Stage] = {}
    for tp in sizes:
        for pp in _divisors(world // tp):
            for cp in _divisors(world // tp // pp):
                rows = max(1, stage.rows_per_step // (world // tp // pp // cp))
                for virtual in _virtual_stages(pp, layers):
                    for ep in _divisors(experts) if experts else [1]:
                        for together in [False, True] if tp > 1 else [False]:
                            for recompute in RECOMPUTE:
                                parallel = recipe.parallel.model_copy(
                                    update={
                                        "tp": tp, "pp": pp, "cp": cp, "ep": ep, "virtual_stages": virtual,
                                        "sequence_parallel": together, "recompute": recompute, "world_size": world,
                                    }
                                )  # fmt: skip
                                for micro_batch in _divisors(rows):
                                    if micro_batch not in stages:
                                        update = {"micro_batch": micro_batch, "parallel": {}}
                                        stages[micro_batch] = stage.model_copy(update=update)
                                    yield parallel, stages[micro_batch]


def _virtual_stages(pp: int, layers: int) -> list[int]:
    """1, 2, 4, … and a block for each, while there are blocks; 1 alone where even that is too many."""
    if pp == 1 or pp > layers:
        return [1]
    most = layers // pp
    return sorted({1, most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
