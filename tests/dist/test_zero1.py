"""ZeRO-1: when reductions are issued, and that it equals all-reduce, torch's AdamW and torch's clipping."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.schema import Optimizer, Parallel
from megatron_lite.models.transformer import build
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ParallelContext, single_process
from megatron_lite.train.inputs import to_device
from megatron_lite.train.step import clip_scale, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Run, build_run, qwen3, stablelm, step_batches

TIED = Run(qwen3(), rows=6, micro_batch=1, seq_len=8)
BIASED = Run(stablelm(attention_bias=True, mlp_bias=True), rows=6, micro_batch=1, seq_len=8, masked=True)


# ---- the order of issue


def _issued(ctx: ParallelContext, run: Run) -> list[str]:
    """What happened during a step: gradients by parameter name, reductions by bucket, ends of backward passes."""
    model, optimizer = build_run(run, ctx)
    events: list[str] = []
    names = {state.grad.data_ptr(): state.bucket.name for state in optimizer.states}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: events.append(f"gradient {name}"))
    start = comm.reduce_scatter_start

    def recording(out, whole, axis):
        events.append(f"reduce {names[whole.data_ptr()]}")
        return start(out, whole, axis)

    batches = step_batches(run, ctx, 0)
    with patch.object(comm, "reduce_scatter_start", recording):
        for i, batch in enumerate(batches):
            optimizer.expect(last=i == len(batches) - 1)
            (model(*to_device(batch, ctx)) / 48).backward()
            events.append("end of backward")
        optimizer.reduce()
    assert [e for e in events if e.startswith("reduce")] == [f"reduce {s.bucket.name}" for s in optimizer.states]
    return events


@pytest.mark.parametrize("config", [TIED.model, BIASED.model], ids=lambda c: c.model_type)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_first_bucket_is_on_its_way_before_the_first_layer_has_gradients(config, accumulation):
    run = Run(config, rows=2 * accumulation, micro_batch=1, seq_len=8, bucket_elements=10_000)
    one, other = run_ranks(_issued, 2, run)
    assert [e for e in one if e.startswith("reduce")] == [e for e in other if e.startswith("reduce")]
    for events in (one, other):
        ends = [i for i, event in enumerate(events) if event == "end of backward"]
        assert len(ends) == accumulation
        last = [-1, *ends][-2]
        reductions = [i for i, event in enumerate(events) if event.startswith("reduce")]
        first_layer = next(i for i in range(last + 1, ends[-1]) if "gradient model.layers.0." in events[i])
        assert reductions[0] > last, "a reduction began before the last backward"
        assert reductions[0] < first_layer, events[last + 1 :]
        assert len(reductions) >= 4


def _hooks(ctx: ParallelContext) -> None:
    model, optimizer = build_run(TIED, ctx)
    fired: dict[str, int] = {}
    complete = {}
    states = {slot.parameter: (state, slot) for state in optimizer.states for slot in state.bucket.slots}
    for name, parameter in model.named_parameters():

        def note(parameter, name=name):
            fired[name] = fired.get(name, 0) + 1
            assert parameter.grad is None  # the optimizer's hook, which came first, has taken it
            state, slot = states[name]
            complete[name] = state.grad[slot.offset : slot.offset + slot.numel].clone()

        parameter.register_post_accumulate_grad_hook(note)
    for passes, batch in enumerate(step_batches(TIED, ctx, 0)[:3], start=1):
        optimizer.expect(last=False)
        model(*to_device(batch, ctx)).backward()
        assert fired == {name: passes for name, _ in model.named_parameters()}
        for name, value in complete.items():
            state, slot = states[name]
            assert torch.equal(value, state.grad[slot.offset : slot.offset + slot.numel]), name


@pytest.mark.req("F01")
def test_the_hook_fires_once_per_backward_after_all_uses_of_a_tied_weight():
    run_ranks(_hooks, 1)


def _one_reduction(ctx: ParallelContext, overlap: bool) -> list[torch.Tensor]:
    model, optimizer = build_run(BIASED, ctx)
    batches = step_batches(BIASED, ctx, 0)
    for i, batch in enumerate(batches):
        optimizer.expect(last=overlap and i == len(batches) - 1)
        model(*to_device(batch, ctx)).backward()
    optimizer.reduce()
    return [state.grad[state.own].clone() for state in optimizer.states]


@pytest.mark.req("F11")
def test_reducing_during_the_backward_changes_no_bit():
    for during, after in zip(run_ranks(_one_reduction, 2, True), run_ranks(_one_reduction, 2, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(during, after, strict=True))


# ---- equal to the plain way


def _against_torch(ctx: ParallelContext, run: Run, steps: int) -> list[float]:
    """Our steps beside all-reduce of each gradient, clip_grad_norm_ and torch.optim.AdamW; returns the norms."""
    model, optimizer = build_run(run, ctx)
    plain = build(run.model, ctx.tp, default_ops(), dtype=torch.float32).to_empty(device="cpu")
    plain.load_state_dict(model.state_dict())
    o = run.optimizer
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=o.betas, eps=o.eps, foreach=False)
    norms = []
    for step in range(steps):
        lr = 1e-3 * (step + 1)
        batches = step_batches(run, ctx, step)
        counts = torch.tensor(sum(batch.valid_tokens for batch in batches))
        if ctx.world.size > 1:
            dist.all_reduce(counts)
        total = torch.zeros(())
        for batch in batches:
            loss = plain(*to_device(batch, ctx)) / counts
            loss.backward()
            total += loss.detach()
        if ctx.world.size > 1:
            dist.all_reduce(total)
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), o.clip)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        adamw.zero_grad()
        result = train_step(model, optimizer, batches, ctx, lr=lr, clip=o.clip)
        assert result.valid_tokens == counts
        assert result.loss == pytest.approx(total.item(), rel=2e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        norms.append(result.grad_norm)
        optimizer.wait()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    return norms


@pytest.mark.req("F01", "F03", "F05", "F06", "O05")
@pytest.mark.parametrize("run", [TIED, BIASED], ids=["tied", "biased"])
@pytest.mark.parametrize("dp, zero", [(1, 1), (2, 1), (3, 1), (3, 0)])
def test_steps_equal_those_of_plain_torch(run, dp, zero):
    # eps: a bias of k has no gradient but rounding (softmax does not see it), which must not become an update
    clipped = Run(run.model, rows=6, micro_batch=1, seq_len=8, masked=run.masked, bucket_elements=10_000,
                  optimizer=Optimizer(clip=0.5, zero=zero, eps=1e-6))  # fmt: skip
    answers = run_ranks(_against_torch, dp, clipped, 5)
    assert max(answers[0]) > 0.5  # clipping was in force
    assert all(norms == answers[0] for norms in answers)  # to the bit on every rank


def _norm(ctx: ParallelContext, run: Run) -> tuple[float, float]:
    model, optimizer = build_run(run, ctx)
    result = train_step(model, optimizer, step_batches(run, ctx, 0), ctx, lr=1e-3, clip=1.0)
    return result.loss, result.grad_norm


@pytest.mark.req("F03", "F05")
@pytest.mark.parametrize("run", [TIED, BIASED], ids=["tied", "biased"])
def test_the_gradient_norm_is_global_and_the_same_on_every_rank(run):
    truth = run_ranks(_norm, 1, run)[0]
    for sequence_parallel in (False, True):
        changed = Run(run.model, rows=6, micro_batch=1, seq_len=8, masked=run.masked,
                      parallel=Parallel(sequence_parallel=sequence_parallel))  # fmt: skip
        answers = run_ranks(_norm, 2, changed, tp=2)
        assert answers[0] == answers[1]
        assert answers[0] == pytest.approx(truth, rel=1e-5)


@pytest.mark.req("O05")
def test_clipping_scales_to_the_limit_and_never_up():
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(1e9, 0.0) == 1.0


# ---- what is held, decayed, protected


@pytest.mark.req("F15")
def test_one_dimensional_parameters_are_not_decayed():
    run = Run(qwen3(attention_bias=True), optimizer=Optimizer(weight_decay=0.5))
    model, optimizer = build_run(run, single_process())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.update(lr=0.1)  # all gradients are zero: only decay moves anything
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
    undecayed = optimizer.undecayed()
    assert "model.layers.1.self_attn.k_norm.weight" in undecayed and "model.layers.0.self_attn.q_proj.bias" in undecayed
    assert all("norm" in name or name.endswith("bias") for name in undecayed)
    assert len(undecayed) == 2 * (2 + 2 + 4) + 1


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["update", "fill", "publish"])
def test_writing_weights_between_forward_and_backward_raises(weights, precision):
    run = Run(qwen3(), precision=precision)
    model, optimizer = build_run(run, single_process())
    (batch, *_) = step_batches(run, single_process(), 0)
    optimizer.expect(last=True)
    loss = model(*to_device(batch, single_process()))
    if weights == "update":
        optimizer.update(lr=1e-3)
    elif weights == "publish":
        optimizer.publish()
    else:
        optimizer.fill([("model.layers.1.mlp.down_proj.weight", torch.zeros(64, 128))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _held(ctx: ParallelContext, zero: int) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    optimizer: Zero1 = build_run(Run(qwen3(), optimizer=Optimizer(zero=zero)), ctx)[1]
    spans = []
    for kept, saved in zip(optimizer.shards(), optimizer.owned(), strict=True):
        for shard in (kept, saved):
            assert {t.numel() for t in shard.tensors.values()} == {shard.hi - shard.lo}
            assert {t.dtype for t in shard.tensors.values()} == {torch.float32}
        spans.append(((kept.lo, kept.hi, kept.size), (saved.lo, saved.hi, saved.size)))
    return spans


@pytest.mark.req("F14")
@pytest.mark.parametrize("zero", [0, 1])
def test_each_rank_keeps_and_saves_its_share(zero):
    answers = run_ranks(_held, 3, zero)
    for bucket in zip(*answers, strict=True):
        size = bucket[0][0][2]
        saved = [saved for _, saved in bucket]
        assert saved == [(rank * size // 3, (rank + 1) * size // 3, size) for rank in range(3)]
        assert [kept for kept, _ in bucket] == (saved if zero else [(0, size, size)] * 3)


def _masters(ctx: ParallelContext) -> list[tuple[torch.Tensor, torch.Tensor]]:
    run = Run(qwen3(), rows=6, micro_batch=1, seq_len=8, precision=torch.bfloat16)
    model, optimizer = build_run(run, ctx)
    for step in range(3):
        train_step(model, optimizer, step_batches(run, ctx, step), ctx, lr=1e-3, clip=1.0)
    optimizer.wait()
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return [(state.master, state.bucket.base) for state in optimizer.states]


def test_bf16_weights_are_the_rounded_fp32_masters_on_every_rank():
    one, other = run_ranks(_masters, 2)
    for (low, base), (high, other_base) in zip(one, other, strict=True):
        master = torch.cat((low, high))
        assert master.dtype == torch.float32
        assert torch.equal(base, other_base) and torch.equal(base, master.bfloat16())
    assert any(not torch.equal(low, low.bfloat16().float()) for low, _ in one)


def test_moments_can_start_afresh():
    run = Run(qwen3(), rows=2)
    ctx = single_process()
    model, optimizer = build_run(run, ctx)
    train_step(model, optimizer, step_batches(run, ctx, 0), ctx, lr=1e-3, clip=1.0)
    assert optimizer.updates == 1 and all(state.exp_avg_sq.any() for state in optimizer.states)
    optimizer.reset_moments()
    assert optimizer.updates == 0
    assert not any(state.exp_avg.any() or state.exp_avg_sq.any() for state in optimizer.states)
