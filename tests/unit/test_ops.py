"""Each op against its plain formula: values and gradients, odd sizes; and the table that chooses backends."""

from __future__ import annotations

import inspect
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.config.layout_rules import WITHOUT_PARTS
from megatron_lite.errors import ConfigError
from megatron_lite.models.generate import pack
from megatron_lite.models.transformer import build
from megatron_lite.ops import select, stand_in, vendor
from megatron_lite.ops.documents import Documents, Segments
from megatron_lite.ops.reference import adamw, attention, attention_parts, cross_entropy, pointwise
from megatron_lite.parallel.context import single_process
from tests.helpers.tiny import Run, build_run, qwen3, stablelm


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def grads(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a fixed random combination of y."""
    return torch.autograd.grad(y, leaves, draw(*y.shape, seed=9, dtype=y.dtype).detach())


def documents(*lengths: int) -> Documents:
    return pack([[0] * n for n in lengths], torch.device("cpu"))[1]


# ---- norms


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@pytest.mark.parametrize("shape", [(63, 60), (5, 3, 17), (1, 1)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_equals_autograd_of_the_formula(shape, dtype, tolerance):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], seed=1, dtype=dtype)
    ours, plain = pointwise.rms_norm(x, weight, 1e-6), plain_rms_norm(x, weight, 1e-6)
    assert ours.dtype == dtype and torch.equal(ours, plain)
    for mine, theirs in zip(grads(ours, x, weight), grads(plain, x, weight), strict=True):
        assert mine.dtype == dtype
        largest = theirs.float().abs().max()
        assert (mine.float() - theirs.float()).abs().max() <= tolerance * largest + 1e-6


@pytest.mark.req("N02")
def test_epsilon_is_added_to_the_variance():
    x, weight = draw(31, 60) * 1e-4, torch.ones(60)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(pointwise.rms_norm(x, weight, 1e-6).double(), expected, rtol=1e-6, atol=0)
    wrong = x.double() / (x.double().square().mean(-1, keepdim=True).sqrt() + 1e-6)
    assert (wrong / expected).min() > 5  # the two readings are far apart at this scale


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_layer_norm_equals_its_formula(dtype, tolerance):
    x, weight, bias = (draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(63, 60), (60,), (60,)]))
    ours = pointwise.layer_norm(x, weight, bias, 1e-5)
    x32 = x.float()
    variance = x32.var(-1, correction=0, keepdim=True)
    plain = (x32 - x32.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() * weight.float() + bias.float()
    torch.testing.assert_close(ours.float(), plain, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(grads(ours, x, weight, bias), grads(plain.to(dtype), x, weight, bias), strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max() * 4


# ---- rotation and activation


@pytest.mark.req("K05")
@pytest.mark.parametrize("r", [1, 5, 8])
def test_rope_turns_pairs_as_complex_numbers_and_leaves_the_rest(r):
    x = draw(13, 3, 16)
    angles = torch.arange(13.0)[:, None] * torch.logspace(0, -2, r)
    y = pointwise.rope(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :r], x[..., r : 2 * r]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(y, torch.cat((turned.real, turned.imag, x[..., 2 * r :]), -1))
    assert torch.equal(y[0], x[0])
    assert torch.equal(y[..., 2 * r :], x[..., 2 * r :])
    (dx,) = grads(y, x)  # a rotation's gradient is the rotation back
    back = pointwise.rope(draw(13, 3, 16, seed=9), angles.cos(), -angles.sin())
    torch.testing.assert_close(dx, back.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_equals_autograd_of_the_formula(dtype):
    x = draw(11, 2 * 37, dtype=dtype)
    gate, up = x.chunk(2, -1)
    plain, ours = F.silu(gate) * up, pointwise.swiglu(x)
    assert torch.equal(ours, plain)
    torch.testing.assert_close(grads(ours, x), grads(plain, x))


# ---- attention


@pytest.mark.req("J03")
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [(1,), (7,), (5, 1, 13), (9, 9, 9), (3, 64, 150)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("backend", [attention.sdpa, attention.blocked])
def test_a_backend_equals_the_formula_inside_each_document(heads, kv_heads, lengths, dtype, tolerance, backend):
    q, k, v = (draw(sum(lengths), n, 10, seed=n + i, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))
    doc = documents(*lengths)
    ours, plain = backend(q, k, v, doc, 0.3), attention.naive(q, k, v, doc, 0.3)
    assert ours.dtype == plain.dtype == dtype
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(grads(ours, q, k, v), grads(plain, q, k, v), strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max() + tolerance


@pytest.mark.parametrize("backend", [attention.sdpa, attention.blocked])
def test_equal_rows_in_one_call_equal_one_call_per_row(backend):
    q, k, v = (draw(27, n, 10, seed=i) for i, n in enumerate((4, 2, 2)))
    doc = documents(9, 9, 9)
    together = Documents(doc.cu_seqlens, doc.lengths, 9, doc.position_ids, row_length=9)
    torch.testing.assert_close(backend(q, k, v, together, 0.3), backend(q, k, v, doc, 0.3))


def test_the_formula_is_softmax_over_the_past():
    q, k, v = draw(3, 1, 2), draw(3, 1, 2, seed=1), draw(3, 1, 2, seed=2)
    out = attention.naive(q, k, v, documents(3), 0.5)[:, 0]
    for t in range(3):
        weights = torch.stack([torch.exp(q[t, 0] @ k[s, 0] * 0.5) for s in range(t + 1)])
        torch.testing.assert_close(out[t], (weights / weights.sum()) @ v[: t + 1, 0])


@pytest.mark.req("J04")
@pytest.mark.parametrize("backend", list(select.TABLE["attention"]))
def test_a_backend_takes_borders_and_no_mask_beside_them(backend):
    if select.TABLE["attention"][backend].missing("cpu", "fp32"):
        pytest.skip("cannot be loaded here")
    function, parts = select.TABLE["attention"][backend].load()
    assert list(inspect.signature(function).parameters) == ["q", "k", "v", "doc", "scale"]
    if parts is not None:
        assert list(inspect.signature(parts.forward).parameters) == ["q", "k", "v", "segments", "scale"]


@pytest.mark.req("J01", "J03")
@pytest.mark.parametrize("backend", ["blocked", "sdpa", "naive"])
@pytest.mark.parametrize("config", [stablelm(), qwen3()], ids=lambda c: c.model_type)
def test_a_document_does_not_see_the_one_before_it(config, backend):
    model, _ = build_run(Run(config), single_process())
    for block in model.model.layers.values():
        block.self_attn.attention = select.build(select.resolve({"attention": backend}, "cpu", "fp32")).attention
    first, second = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]
    ids = torch.tensor([*first, *second])
    changed = ids.clone()
    changed[2] = 77
    with torch.no_grad():
        for doc, seen in ((documents(5, 7), False), (documents(12), True)):
            difference = (model.logits(ids, doc) - model.logits(changed, doc)).abs()
            assert difference[:2].max() == 0 and difference[2:5].max() > 1e-4
            assert (difference[5:].max() > 1e-4) == seen


# ---- attention to some of the keys

PARTS = [attention_parts.naive(), attention_parts.blocked()]


def segments(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], causal: bool) -> Segments:
    return Segments.of(q_lengths, k_lengths, causal=causal, device=torch.device("cpu"))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seg: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over one [Tq, Tk] mask, in fp64."""
    mask = torch.block_diag(*(
        torch.ones(a, b).tril(b - a) if seg.causal else torch.ones(a, b)
        for a, b in zip(seg.q_lengths, seg.k_lengths, strict=True)
    )).bool()  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = (torch.einsum("qnh,knh->nqk", q.double(), k) * 0.3).masked_fill(~mask, -torch.inf)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1), v), scores.logsumexp(-1).T


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2)])
@pytest.mark.parametrize("q_lengths, k_lengths", [((1,), (1,)), ((5, 1, 70), (5, 4, 150)), ((13, 64), (64, 65))])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("parts", PARTS, ids=["naive", "blocked"])
def test_attention_to_some_keys_equals_the_formula_under_a_mask(
    heads, kv_heads, q_lengths, k_lengths, causal, dtype, tolerance, parts
):
    q = draw(sum(q_lengths), heads, 10, dtype=dtype)
    k, v = (draw(sum(k_lengths), kv_heads, 10, seed=i, dtype=dtype) for i in (1, 2))
    seg = segments(q_lengths, k_lengths, causal)
    plain, plain_lse = dense(q, k, v, seg)
    out, lse = parts.forward(q.detach(), k.detach(), v.detach(), seg, 0.3)
    assert (out.dtype, lse.dtype, lse.shape) == (dtype, torch.float32, q.shape[:2])
    torch.testing.assert_close(out.double(), plain, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), plain_lse, rtol=tolerance, atol=tolerance)
    grad = draw(*out.shape, seed=9, dtype=dtype).detach()
    mine = parts.backward(grad, q.detach(), k.detach(), v.detach(), out, lse, seg, 0.3)
    for ours, theirs in zip(mine, torch.autograd.grad(plain, (q, k, v), grad.double()), strict=True):
        assert ours.dtype in (dtype, torch.float32)
        assert (ours.double() - theirs.double()).abs().max() <= tolerance * theirs.double().abs().max() + tolerance


@pytest.mark.parametrize("parts", PARTS, ids=["naive", "blocked"])
def test_parts_merge_into_the_whole_and_share_its_gradients(parts):
    q, k, v = (draw(30, n, 7, seed=i).detach() for i, n in enumerate((4, 2, 2)))
    whole = segments((30,), (30,), False)
    out, lse = parts.forward(q, k, v, whole, 0.3)
    grad = draw(*out.shape, seed=9).detach()
    dq, dk, dv = parts.backward(grad, q, k, v, out, lse, whole, 0.3)
    halves = [(slice(0, 11), segments((30,), (11,), False)), (slice(11, 30), segments((30,), (19,), False))]
    outs, lses = zip(*(parts.forward(q, k[at], v[at], seg, 0.3) for at, seg in halves), strict=True)
    torch.testing.assert_close(torch.stack(lses).logsumexp(0), lse)
    weights = (torch.stack(lses) - lse).exp()[..., None]
    torch.testing.assert_close((weights * torch.stack(outs)).sum(0), out)
    shares = [parts.backward(grad, q, k[at], v[at], out, lse, seg, 0.3) for at, seg in halves]
    torch.testing.assert_close(shares[0][0] + shares[1][0], dq)
    torch.testing.assert_close(torch.cat([share[1] for share in shares]), dk)
    torch.testing.assert_close(torch.cat([share[2] for share in shares]), dv)


def test_the_stand_in_has_parts_of_the_shapes_of_the_formulas():
    with FakeTensorMode():
        q, k, v = torch.empty(12, 4, 8), torch.empty(20, 2, 8), torch.empty(20, 2, 8)
        seg = segments((5, 7), (5, 15), True)
        out, lse = stand_in.flash_parts().forward(q, k, v, seg, 0.3)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (12, 4), torch.float32)
        grads = stand_in.flash_parts().backward(out, q, k, v, out, lse, seg, 0.3)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def flash_package(*, old: bool = False) -> dict[str, ModuleType]:
    """A package with flash-attn's names and arguments, which works by the formula."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    formula = attention_parts.naive()

    def as_segments(cu_q: torch.Tensor, cu_k: torch.Tensor, causal: bool, longest: tuple[int, int]) -> Segments:
        seg = segments(tuple(cu_q.diff().tolist()), tuple(cu_k.diff().tolist()), causal)
        assert (seg.max_q, seg.max_k) == longest
        return seg

    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
                block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False):  # fmt: skip
        assert dropout_p == 0.0
        seg = as_segments(cu_seqlens_q, cu_seqlens_k, causal, (max_seqlen_q, max_seqlen_k))
        out, lse = formula.forward(q, k, v, seg, softmax_scale)
        return out, lse.T.contiguous(), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                 dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                 deterministic, rng_state=None, zero_tensors=False):  # fmt: skip
        assert softmax_lse.is_contiguous() and (dropout_p, softcap, window_size_left, window_size_right) == (
            0,
            0,
            -1,
            -1,
        )
        seg = as_segments(cu_seqlens_q, cu_seqlens_k, causal, (max_seqlen_q, max_seqlen_k))
        found = formula.backward(dout, q, k, v, out, softmax_lse.T, seg, softmax_scale)
        for place, gradient in zip((dq, dk, dv), found, strict=True):
            place.copy_(gradient)

    def before_2_7(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, window_size):
        raise AssertionError

    interface._flash_attn_varlen_forward = forward
    interface._flash_attn_varlen_backward = before_2_7 if old else backward
    package.flash_attn_varlen_func, package.flash_attn_interface = None, interface
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attns_halves_are_called_with_its_own_arguments(causal):
    with mock.patch.dict("sys.modules", flash_package()):
        _, parts = vendor.flash_attention()
    q, k, v = (draw(n, heads, 8, seed=n).detach() for n, heads in ((12, 4), (20, 2), (20, 2)))
    seg = segments((5, 7), (5, 15), causal)
    formula = attention_parts.naive()
    out, lse = parts.forward(q, k, v, seg, 0.3)
    assert torch.equal(out, formula.forward(q, k, v, seg, 0.3)[0]) and lse.shape == (12, 4)
    for a, b in zip(*(x.backward(q, q, k, v, out, lse, seg, 0.3) for x in (parts, formula)), strict=True):
        assert torch.equal(a, b)
    with mock.patch.dict("sys.modules", flash_package(old=True)):
        assert vendor.flash_attention()[1] is None


def test_every_attention_kernel_has_its_parts_or_says_that_it_has_none():
    loaded = {name: select.build({**select.resolve({}, "cpu", "fp32"), "attention": name}) for name in
              ("blocked", "sdpa", "naive")}  # fmt: skip
    assert {name for name, ops in loaded.items() if ops.attention_parts is None} == {"sdpa"}
    assert set(loaded) - set(WITHOUT_PARTS) < set(select.WITH_PARTS)
    assert set(select.TABLE["attention"]) - set(select.WITH_PARTS) == set(WITHOUT_PARTS)


# ---- cross-entropy, halves over a cut vocabulary


@pytest.mark.parametrize("cuts", [[101], [60, 41], [1, 50, 50]])
def test_local_halves_add_up_to_the_cross_entropy(cuts):
    logits = (draw(23, 101) * 5).detach().requires_grad_()
    labels = torch.randint(0, 101, (23,), generator=torch.Generator().manual_seed(1))
    valid = torch.arange(23) % 3 > 0
    parts, start = [], 0
    for part in logits.detach().split(cuts, -1):
        here = valid & (labels >= start) & (labels < start + part.shape[1])
        parts.append((part.clone(), torch.where(here, labels - start, -1)))
        start += part.shape[1]
    top, exps, target = (torch.stack(s) for s in zip(*(cross_entropy.stats(*part) for part in parts), strict=True))
    lse = top.amax(0) + (exps * (top - top.amax(0)).exp()).sum(0).log()
    losses = F.cross_entropy(logits, labels.where(valid, -100), reduction="none")
    torch.testing.assert_close((lse - target.sum(0)) * valid, losses)
    scales = (top - lse).exp() * valid
    dz = torch.cat([cross_entropy.grad(part, s, local) for (part, local), s in zip(parts, scales, strict=True)], -1)
    torch.testing.assert_close(dz, torch.autograd.grad(losses.sum(), logits)[0])
    assert dz[~valid].abs().max() == 0


def test_a_rank_of_padding_only_adds_nothing():
    logits = torch.full((4, 3), -torch.inf)
    top, exps, target = cross_entropy.stats(logits, torch.full((4,), -1))
    assert torch.isfinite(top).all() and exps.eq(0).all() and target.eq(0).all()
    assert cross_entropy.grad(logits, (top - 1.0).exp(), torch.full((4,), -1)).eq(0).all()


# ---- AdamW


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("backend", [adamw.fused, adamw.formula])
def test_adamw_equals_torchs_over_several_steps(backend, weight_decay):
    size, options = 1001, {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    master, exp_avg, exp_avg_sq = draw(size).detach(), torch.zeros(size), torch.zeros(size)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], **options, foreach=False)
    for step in range(1, 8):
        gradient = draw(size, seed=step).detach() * 10.0 ** (step - 4)
        parameter.grad = gradient.clone()
        optimizer.step()
        backend(master, gradient, exp_avg, exp_avg_sq, step=step, **options)
        torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-7)
    state = optimizer.state[parameter]
    torch.testing.assert_close(exp_avg, state["exp_avg"])
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"])


# ---- the table


def test_auto_takes_what_runs_here():
    chosen = select.resolve({}, "cpu", "fp32")
    assert set(chosen) == set(select.TABLE)
    assert chosen["attention"] == "blocked" and chosen["adamw"] == "fused"
    assert select.resolve({"attention": "naive"}, "cpu", "fp32")["attention"] == "naive"


@pytest.mark.req("J03")
def test_a_backend_that_cannot_run_is_refused_with_a_list_of_those_that_can():
    with pytest.raises(ConfigError, match=r"attention = 'flash_attn' .*needs cuda, this is cpu; blocked: available"):
        select.resolve({"attention": "flash_attn"}, "cpu", "bf16")
    with pytest.raises(ConfigError, match="needs bf16, this run is fp32"):
        select.resolve({"attention": "flash_attn"}, "cuda", "fp32")
    with pytest.raises(ConfigError, match=r"attention = 'ring' cannot be used here .*naive: available"):
        select.resolve({"attention": "ring"}, "cpu", "fp32")
    with pytest.raises(ConfigError, match="no op atention; there are attention, norm"):
        select.resolve({"atention": "sdpa"}, "cpu", "fp32")


def test_the_model_calls_the_chosen_backend():
    ops = select.build(select.resolve({"attention": "naive"}, "cpu", "fp32"))
    model = build(qwen3(), single_process().tp, ops, dtype=torch.float32)
    assert all(block.self_attn.attention is attention.naive for block in model.model.layers.values())
