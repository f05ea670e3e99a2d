"""Sampling from a model, with the keys and values of what was already read kept in a cache.

Prompts of unequal length go through the model packed, like any documents; afterwards each forward reads one token per
unfinished sequence. The model's text knows nothing of this: while generating, each block's attention is replaced by one
that remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.errors import require
from megatron_lite.models.attention import Attention
from megatron_lite.models.transformer import Transformer
from megatron_lite.ops.documents import Documents


class KVCache:
    """Keys and values of the sequences of one batch, with room for `capacity` tokens each."""

    def __init__(self, model: Transformer, capacity: int):
        self.model, self.capacity = model, capacity
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * len(model.model.layers)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block every attention of the model reads and extends the cache."""
        mixers = [module for module in self.model.modules() if isinstance(module, Attention)]
        for i, mixer in enumerate(mixers):
            mixer.attention = self._remembering(i)
        try:
            yield
        finally:
            for mixer in mixers:
                mixer.attention = self.model.ops.attention

    def _remembering(self, layer: int) -> Callable[[Tensor, Tensor, Tensor, Documents, float], Tensor]:
        def attention(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
            if self.layers[layer] is None:
                self.layers[layer] = (self._spread(k, doc), self._spread(v, doc))
                return self.model.ops.attention(q, k, v, doc, scale)
            return self._attend(layer, q, k, v, doc, scale)

        return attention

    def _spread(self, x: Tensor, doc: Documents) -> Tensor:
        """Packed [T, g, H] -> [B, capacity, g, H]."""
        out = x.new_zeros(len(doc.lengths), self.capacity, *x.shape[1:])
        for i, part in enumerate(x.split(doc.lengths)):
            out[i, : len(part)] = part
        return out

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
        """One new token per sequence, at doc.position_ids [B]: q [B, n, H], k and v [B, g, H] -> [B, n, H]."""
        kept = self.layers[layer]
        assert kept is not None
        keys, values = kept
        rows, at = torch.arange(len(q), device=q.device), doc.position_ids
        keys[rows, at], values[rows, at] = k, v
        longest = int(at.max()) + 1
        seen = torch.arange(longest, device=q.device) <= at[:, None]
        return F.scaled_dot_product_attention(
            q[:, :, None], keys[:, :longest].transpose(1, 2), values[:, :longest].transpose(1, 2),
            attn_mask=seen[:, None, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )[:, :, 0]  # fmt: skip


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Documents]:
    """Sequences end to end, [T] ids, as documents that attention keeps apart."""
    lengths = tuple(len(s) for s in sequences)
    ids = torch.tensor([token for s in sequences for token in s], dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    cu_seqlens = torch.tensor((0, *lengths), device=device).cumsum(0).int()
    return ids, Documents(cu_seqlens, lengths, max(lengths), positions)


def _next_tokens(last: Sequence[int], positions: Tensor) -> tuple[Tensor, Documents]:
    """One new token per sequence, at its position."""
    ones = (1,) * len(last)
    cu_seqlens = torch.arange(len(last) + 1, dtype=torch.int32, device=positions.device)
    return torch.tensor(last, device=positions.device), Documents(cu_seqlens, ones, 1, positions)


def sample(logits_BV: Tensor, temperature: float, top_p: float, stream: torch.Generator) -> list[int]:
    """One id per row: the likeliest at temperature 0, else drawn from the smallest set whose probability is top_p."""
    if temperature == 0:
        return logits_BV.argmax(-1).tolist()
    probabilities, ids = (logits_BV / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities  # mass of the likelier ids: the first is always kept
    kept = probabilities.masked_fill(before >= top_p, 0.0).cpu()
    drawn = torch.multinomial(kept, 1, generator=stream)
    return ids.gather(-1, drawn.to(ids.device))[:, 0].tolist()


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_id: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Continuations of the prompts (without them, and without the stop id), at most max_new_tokens ids each.

    Errors: ConfigError for an empty prompt, an id outside the vocabulary, or sampling parameters out of range.
    """
    require(all(len(p) > 0 for p in prompts) and len(prompts) > 0, "every prompt needs at least one token")
    vocab_size = model.head.vocab_size
    for token in (t for p in prompts for t in p):
        require(0 <= token < vocab_size, f"a prompt holds id {token}, outside the model's vocabulary of {vocab_size}")
    require(temperature >= 0, f"temperature {temperature} is negative")
    require(0 < top_p <= 1, f"top_p {top_p} is not in (0, 1]")
    device = next(model.parameters()).device
    stream = torch.Generator().manual_seed(seed)
    cache = KVCache(model, max(map(len, prompts)) + max_new_tokens)
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    positions = torch.tensor([len(p) for p in prompts], device=device)
    with cache.attached():
        ids, doc = pack(prompts, device)
        last = doc.cu_seqlens[1:].long() - 1
        for _ in range(max_new_tokens):
            chosen = sample(model.logits(ids, doc, at=last), temperature, top_p, stream)
            for i, token in enumerate(chosen):
                done[i] = done[i] or token == stop_id
                if not done[i]:
                    outputs[i].append(token)
            if all(done):
                break
            ids, doc = _next_tokens(chosen, positions)
            last = torch.arange(len(prompts), device=device)
            positions = positions + 1
    return outputs
