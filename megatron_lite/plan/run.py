"""What a recipe would cost, without running it: `pretrain.py --dry-run`. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config.check import check, not_built
from megatron_lite.config.schema import Recipe, Stage
from megatron_lite.config.stages import for_stage
from megatron_lite.errors import ConfigError
from megatron_lite.models.shapes import num_active_parameters, num_non_embedding_parameters, num_parameters
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.schedule import bubble, live
from megatron_lite.plan.devices import DEVICES
from megatron_lite.plan.division import PipelineRank, divide, kinds, pipeline_ranks
from megatron_lite.plan.flops import Flops, flops_per_token
from megatron_lite.plan.memory import Memory, activation_bytes, rank_memory
from megatron_lite.plan.speed import StepTime, step_time
from megatron_lite.plan.traffic import Flow, flows, most

__all__ = ["StagePlan", "activation_bytes", "describe", "flops_per_token", "plan_stage"]

DEVICE, PEAK_FLOPS, MFU = "A100", 312e12, 0.40  # the stated assumption of the days; bf16 without sparsity
ESTIMATED = "A100-40"  # whose step time is estimated; tools/plan_layout.py asks for others
GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class StagePlan:
    """The arithmetic of one stage on a number of ranks."""

    stage: Stage
    recipe: Recipe  # as the stage sees it
    grid: Grid
    flops: Flops  # of one token
    micro_batches: int  # of each data-parallel rank in one step
    ranks: tuple[PipelineRank, ...]  # what each pp rank holds
    fullest: int  # pp rank that needs most memory
    memory: Memory  # of that one
    flows: tuple[Flow, ...]  # the most that any rank sends in one step
    time: StepTime  # of a step on ESTIMATED

    @property
    def traffic(self) -> dict[str, int]:
        """What goes over which axis -> bytes a rank sends in one step."""
        return {flow.name: flow.sent for flow in self.flows}

    @property
    def tokens(self) -> int:
        """Of the whole stage."""
        return self.stage.tokens_after(self.stage.num_steps)

    @property
    def days(self) -> float:
        """At the stated device and utilisation (full attention convention)."""
        return self.tokens * self.flops.full / (self.grid.world * PEAK_FLOPS * MFU) / 86_400


def plan_stage(recipe: Recipe, index: int, world_size: int) -> StagePlan:
    """The plan of stage `index` (from 0) on `world_size` ranks.

    Errors: ConfigError with every reason why the stage cannot be divided among that many ranks.
    """
    if problems := check(recipe, world_size, stage=index, planned=True):
        raise ConfigError("\n  - ".join([f"stage {index + 1} cannot be planned for {world_size} ranks:", *problems]))
    merged = for_stage(recipe, index)
    stage, model, parallel = merged.stages[index], merged.model, merged.parallel
    grid = Grid(world_size, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep)
    division = divide(stage, parallel, grid, 2 if recipe.precision == "bf16" else 4)
    zero, ranks = merged.optimizer.zero, pipeline_ranks(model, parallel)
    needs = {at.rank: rank_memory(model, parallel, division, at, zero=zero) for at, _ in kinds(ranks)}
    fullest = max(needs, key=lambda rank: needs[rank].total)
    return StagePlan(
        stage=stage,
        recipe=merged,
        grid=grid,
        flops=flops_per_token(model, stage.seq_len),
        micro_batches=division.micro_batches,
        ranks=ranks,
        fullest=fullest,
        memory=needs[fullest],
        flows=tuple(most(flows(model, parallel, division, at, zero=zero) for at, _ in kinds(ranks))),
        time=step_time(
            model, parallel, division, ranks, grid, DEVICES[ESTIMATED], seq_len=stage.seq_len, zero=zero
        ),
    )  # fmt: skip


def describe(recipe: Recipe, stages: Sequence[int], world_size: int) -> str:
    """The report of `--dry-run`: the model, each of `stages` (indices from 0) on `world_size` ranks, and their total.

    Errors: ConfigError where a stage cannot be divided among the ranks.
    """
    plans = [(index, plan_stage(recipe, index, world_size)) for index in stages]
    lines = [*_model(recipe)]
    for index, plan in plans:
        lines += ["", *_stage(index, plan)]
    if len(plans) > 1:
        tokens, days = sum(plan.tokens for _, plan in plans), sum(plan.days for _, plan in plans)
        steps = sum(plan.stage.num_steps for _, plan in plans)
        flops = sum(plan.tokens * plan.flops.full for _, plan in plans)
        lines += [
            "",
            f"all {len(plans)} stages",
            _row("steps", f"{steps:,}"),
            _row("tokens", f"{tokens:,}"),
            _row("FLOPs, full attention", f"{flops:.6e}"),
            _row("days", f"{_days(days)} on {world_size:,} ranks"),
        ]
    unbuilt = [violation.message for index in stages for violation in not_built(recipe, index)]
    lines += ["", *dict.fromkeys(unbuilt)] if unbuilt else []
    lines += [
        "",
        f"1 GB = 10^9 bytes. Days assume {DEVICE} ({PEAK_FLOPS / 1e12:.0f} TFLOP/s in bf16) at {MFU:.0%} MFU "
        "in the full attention convention, without interruptions. How step time is estimated: "
        "megatron_lite/plan/speed.py.",
    ]
    return "\n".join(lines)


def _model(recipe: Recipe) -> list[str]:
    model = recipe.model
    total, active = num_parameters(model), num_active_parameters(model)
    lines = [
        f"model {model.preset or model.model_type}",
        _row("parameters", f"{total:,}"),
        _row("without embedding and head", f"{num_non_embedding_parameters(model):,}"),
    ]
    return lines + ([_row("active per token", f"{active:,}")] if active != total else [])


def _stage(index: int, plan: StagePlan) -> list[str]:
    stage, parallel, memory, grid = plan.stage, plan.recipe.parallel, plan.memory, plan.grid
    layout = f"dp {grid.dp} x tp {parallel.tp}"
    layout += "".join(f" x {name} {size}" for name, size in (("pp", parallel.pp), ("cp", parallel.cp)) if size > 1)
    layout += f", ep {parallel.ep}" if parallel.ep > 1 else ""
    layout += ", sequence parallel" if parallel.sequence_parallel else ""
    per_rank = plan.ranks[plan.fullest].parameters.total
    split = "" if parallel.pp == 1 else f" (pp rank {plan.fullest}, the fullest)"
    lines = [
        f"stage {index + 1}, {stage.name}: {grid.world:,} ranks ({layout}), recompute {parallel.recompute}, "
        f"{plan.recipe.precision}, ZeRO {plan.recipe.optimizer.zero}",
        _row("tokens per step", ", then ".join(f"{size:,}" for size in stage.batch_sizes)),
        _row("steps", f"{stage.num_steps:,}{_until(plan)}"),
        _row("tokens", f"{plan.tokens:,}"),
        _row("rows per step", f"{stage.rows_per_step:,} of {stage.seq_len:,} tokens"),
        _row("micro-batches", f"{plan.micro_batches:,} of {stage.micro_batch:,} rows on each rank"),
        _row("FLOPs per token", f"{plan.flops.full:.6e} full attention, {plan.flops.causal:.6e} causal half"),
        _row("parameters per rank", f"{per_rank:,}{split}"),
        *_pipeline(plan),
        f"  bytes per rank{split}",
    ]
    weights = "bf16" if plan.recipe.precision == "bf16" else "fp32, their own master"
    explained = {
        "weights": weights,
        "gradients": "fp32",
        "optimizer": ("moments" if plan.recipe.precision == "fp32" else "master and moments")
        + (f", a share of 1/{grid.dp * parallel.cp}" if plan.recipe.optimizer.zero else ", whole on every rank"),
        "activations": "kept for backward",
        "working": "the block in backward, or the logits of a chunk",
    }
    lines += [_row(f"  {kind}", f"{_gb(getattr(memory, kind))}  {what}") for kind, what in explained.items()]
    lines += [_row("  total", _gb(memory.total)), "  bytes each rank sends per step, and the least it could"]
    lines += [_row(f"  {flow.name}", f"{_gb(flow.sent)}  {_gb(flow.least).strip()}") for flow in plan.flows]
    lines += [] if plan.flows else [_row("  none", _gb(0))]
    speed = plan.stage.batch_tokens / plan.time.total
    mfu = speed * plan.flops.full / (grid.world * DEVICES[ESTIMATED].peak)
    lines += [
        _row("seconds per step, estimated", f"{plan.time.total:,.3g} on {ESTIMATED}, waiting {plan.time.waiting:.1%}"),
        _row("tokens per second and rank", f"{speed / grid.world:,.0f} estimated, {mfu:.1%} MFU"),
    ]
    return [*lines, _row("days", _days(plan.days))]


def _pipeline(plan: StagePlan) -> list[str]:
    """What each pp rank holds, and how long it waits."""
    pp, virtual = plan.recipe.parallel.pp, plan.recipe.parallel.virtual_stages
    if pp == 1:
        return []
    alive = [live(pp, rank, virtual, plan.micro_batches) for rank in range(pp)]
    chunks = "" if virtual == 1 else f", each in one of {virtual} chunks"
    return [
        _row("blocks of each pp rank", ", ".join("+".join(map(str, at.chunks)) for at in plan.ranks)),
        _row("bubble", f"{bubble(pp, virtual, plan.micro_batches):.1%} of a step"),
        _row("most live micro-batches of each pp rank", f"{', '.join(map(str, alive))}{chunks}"),
    ]


def _until(plan: StagePlan) -> str:
    """What may end the stage before that; how many rows there are is known where the corpora are."""
    sources = {name: plan.recipe.sources[name] for name, weight in plan.stage.mixture.items() if weight}
    limits = [f"{s.max_epochs:g} epochs of {name}" for name, s in sources.items() if s.when_exhausted == "stop"]
    return f", or until {' or '.join(limits)} are over" if limits else ""


def _row(name: str, value: str) -> str:
    return f"  {name:<40} {value}"


def _gb(size: int) -> str:
    return f"{size / GB:10,.3f} GB" if size >= 0.1 * GB or not size else f"{size / MB:10,.3f} MB"


def _days(days: float) -> str:
    return f"{days:,.1f}" if days >= 0.1 else f"{days:.2g}"
