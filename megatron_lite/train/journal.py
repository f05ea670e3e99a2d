"""What a stage tells: printed lines, metrics.jsonl, evaluations.jsonl, samples.jsonl, sinks. Only rank 0 speaks."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from megatron_lite.models.shapes import num_parameters
from megatron_lite.monitor.environment import write_environment
from megatron_lite.monitor.log import log_line, short
from megatron_lite.monitor.metrics import MetricsFile, mfu, peak_flops, peak_memory_bytes
from megatron_lite.monitor.sinks import Sinks
from megatron_lite.pipeline.schedule import bubble, live
from megatron_lite.plan.flops import flops_per_token
from megatron_lite.train.stage import StageRun
from megatron_lite.train.step import StepResult


class Journal:
    """Everything written and printed about one stage. On other ranks than the first every method does nothing."""

    def __init__(self, run: StageRun):
        self.run, self.speaks = run, run.ctx.world.rank == 0
        self.flops_per_token = flops_per_token(run.recipe.model, run.stage.seq_len).full
        self.peak = _peak(run)
        self.seconds = 0.0  # of a step, smoothed
        if self.speaks:
            step, folder, logging = run.state.step, run.folder, run.recipe.logging
            resumed = step or None
            self.metrics = MetricsFile(folder / "metrics.jsonl", resumed)
            self.evaluations = MetricsFile(folder / "evaluations.jsonl", resumed)
            self.samples = MetricsFile(folder / "samples.jsonl", resumed) if logging.samples else None
            self.sinks = Sinks(logging, folder, run.stage.name, run.recipe.model_dump())
            (folder / "recipe.toml").write_text(run.state.recipe)
            write_environment(folder / "environment.json", run.ctx.device, run.ctx.world.size)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.speaks:
            for file in (self.metrics, self.evaluations, self.samples, self.sinks):
                if file is not None:
                    file.close()

    def say(self, line: str) -> None:
        """Print."""
        if self.speaks:
            print(line, flush=True)

    def opening(self) -> None:
        """What is about to run, on what, from where."""
        run, state, ctx = self.run, self.run.state, self.run.ctx
        sizes = " x ".join(f"{axis.name} {axis.size}" for axis in (ctx.pp, ctx.dp, ctx.cp, ctx.tp) if axis.size > 1)
        model = run.recipe.model
        self.say(
            f"stage {run.index + 1} ({run.stage.name}): {model.preset or model.model_type}, "
            f"{num_parameters(model):,} parameters in {run.recipe.precision}, {ctx.world.size} "
            f"rank{'s' if ctx.world.size > 1 else ''}{f' ({sizes})' if sizes else ''} on {ctx.device.type}"
        )
        for line in run.origin:
            self.say(f"  {line}")
        meant = run.recipe.parallel.world_size
        if meant is not None and meant != ctx.world.size:
            self.say(f"  the recipe is meant for {meant} ranks, this is {ctx.world.size}")
        if ctx.pp.size > 1:
            pp, chunks = ctx.pp.size, len(run.model.chunks)
            micro_batches = run.stage.rows_per_step // (run.stage.micro_batch * ctx.dp.size)
            self.say(f"  a pipeline of {pp} ranks with {chunks} x {micro_batches} forwards each: they wait "
                     f"{bubble(pp, chunks, micro_batches):.1%} of a step, at most "
                     f"{live(pp, 0, chunks, micro_batches)} forwards are alive")  # fmt: skip
        self.say("  kernels: " + ", ".join(f"{op} {backend}" for op, backend in run.kernels.items()))
        self.say("  no weight decay on " + _summary(run.optimizer.undecayed()))
        for line in run.rows.describe(run.stage.rows_after(run.stage.num_steps)):
            self.say(f"  {line}")
        self.say(f"  data fingerprint {state.data[:16]}")
        if state.step:
            self.say(f"  goes on after step {state.step}: {state.consumed_samples:,} samples, "
                     f"{short(state.consumed_tokens)} tokens consumed")  # fmt: skip
        if state.complete:
            self.say(f"stage {run.index + 1} is complete at step {state.step}; nothing to do")

    def step(self, result: StepResult, *, lr: float, seconds: float, data_seconds: float) -> None:
        """One line of metrics.jsonl, and every `logging.every` steps a printed one."""
        run, state = self.run, self.run.state
        self.seconds = seconds if not self.seconds else 0.9 * self.seconds + 0.1 * seconds
        if not self.speaks:
            return
        tokens = run.stage.batch_at(state.step)
        tokens_per_second, flops = tokens / seconds, tokens * self.flops_per_token
        utilisation = mfu(flops, seconds, run.ctx.world.size, self.peak)
        entry: dict[str, Any] = {
            "step": state.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "total_tokens": state.total_tokens,
            "valid_tokens": result.valid_tokens,
            "skipped": state.skipped,
            "tokens_per_second": tokens_per_second,
            "flops_per_step": flops,
            "mfu": utilisation,
            "step_time_s": seconds,
            "data_time_s": data_seconds,
            "sources": {
                name: {"loss": total / tokens, "tokens": tokens}
                for name, (total, tokens) in zip(run.rows.names, result.sources, strict=True)
                if tokens
            },
        }
        if run.ctx.pp.size > 1:
            entry["pipeline"] = {"waited": result.waited_s / seconds, "live": result.live}
        self.metrics.write(entry)
        if self.samples is not None:
            self.samples.write({"step": state.step, "samples": self._samples()})
        by_source = {f"loss/{name}": facts["loss"] for name, facts in entry["sources"].items()}
        self.sinks.write(state.step, entry | by_source)
        if state.step % run.recipe.logging.every == 0 or state.complete:
            self.say(log_line(
                step=state.step, num_steps=run.stage.num_steps, tokens=state.total_tokens, loss=result.loss, lr=lr,
                grad_norm=result.grad_norm, step_time_s=seconds, tokens_per_second=tokens_per_second,
                mfu=utilisation, memory_bytes=peak_memory_bytes(run.ctx.device),
                waited=result.waited_s / seconds if run.ctx.pp.size > 1 else None,
                time_left_s=self.seconds * (run.stage.num_steps - state.step),
            ))  # fmt: skip
        if result.skipped:
            self.say(f"step {state.step} skipped: loss {result.loss}, grad norm {result.grad_norm}, "
                     f"{result.valid_tokens} valid tokens; {state.skipped} so far")  # fmt: skip

    def _samples(self) -> list[list[int | str]]:
        """[row of the stage, source, epoch, row of the source] of every row of the step just done."""
        end, rows = self.run.state.consumed_samples, self.run.rows
        begin = end - self.run.stage.batch_at(self.run.state.step) // self.run.stage.seq_len
        return [[row, *rows.place(row)] for row in range(begin, end)]

    def evaluation(self, losses: dict[str, float]) -> None:
        """Losses of the validation sets at this step."""
        if self.speaks:
            state = self.run.state
            self.evaluations.write({"step": state.step, "total_tokens": state.total_tokens, "losses": losses})
            self.sinks.write(state.step, {f"validation/{name}": loss for name, loss in losses.items()})
            self.say(f"validation at step {state.step}: " + ", ".join(f"{n} {v:.4f}" for n, v in losses.items()))


def _peak(run: StageRun) -> float | None:
    """FLOP/s of one device: what the recipe states, else what is known of it."""
    stated = run.recipe.logging.peak_tflops
    if stated is not None:
        return stated * 1e12
    return peak_flops(torch.cuda.get_device_name(run.ctx.device)) if run.ctx.device.type == "cuda" else None


def _summary(names: list[str]) -> str:
    """Parameter names without their layer numbers: each kind once."""
    kinds = dict.fromkeys(".".join(part for part in name.split(".") if not part.isdigit()) for name in names)
    return ", ".join(kinds) or "nothing"
