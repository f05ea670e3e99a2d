"""The whole decoder: embedding, blocks, final norm, head. One class serves StableLM and Qwen3.

Module names follow the Hugging Face keys, except that q|k|v and gate|up are one module each (`named_pieces` says which
named tensors those hold).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel
from megatron_lite.errors import require
from megatron_lite.models.block import Block
from megatron_lite.models.norm import hidden_norm
from megatron_lite.models.placement import Chunk, place
from megatron_lite.models.rope import rotary_tables
from megatron_lite.ops import Ops
from megatron_lite.ops.documents import Documents
from megatron_lite.parallel import comm, recompute
from megatron_lite.parallel.context import Axis, ParallelContext
from megatron_lite.parallel.cp_attention import attention_over
from megatron_lite.parallel.cross_entropy import linear_cross_entropy, logits
from megatron_lite.parallel.embedding import VocabParallelEmbedding, VocabRows
from megatron_lite.parallel.recompute import Recompute
from megatron_lite.parallel.shard import Piece


class Decoder(nn.Module):
    """ids [T] -> normed hidden states [t, D]; a pipeline rank has some of the blocks, under their global numbers."""

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, chunks: tuple[Chunk, ...], ends: Axis | None,
                 sequence_parallel: bool, recompute_mode: Recompute):  # fmt: skip
        super().__init__()
        self.config = config
        self.wrap_block, wrap_core = recompute.policy(recompute_mode)
        if chunks[0].first:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.padded_vocab_size(tp.size), config.hidden_size, tp, ends,
                sequence_parallel=sequence_parallel,
            )  # fmt: skip
        self.layers = nn.ModuleDict({
            str(i): Block(config, tp, ops, sequence_parallel=sequence_parallel, recompute_core=wrap_core)
            for chunk in chunks for i in chunk.layers
        })  # fmt: skip
        if chunks[-1].last:
            self.norm = hidden_norm(config, tp, ops, sequence_parallel=sequence_parallel)

    def forward(self, ids_T: Tensor, doc: Documents, chunk: Chunk, x_tD: Tensor | None = None) -> Tensor:
        rotary = rotary_tables(self.config, doc.position_ids)
        if x_tD is None:
            x_tD = self.embed_tokens(ids_T)
        for i in chunk.layers:
            x_tD = self.wrap_block(self.layers[str(i)], x_tD, rotary, doc)
        return self.norm(x_tD) if chunk.last else x_tD


class Transformer(nn.Module):
    """A causal language model, or the chunks of it that one pipeline rank holds.

    forward(ids [T], labels [T], doc) -> sum of the cross-entropies of labels that are not negative (fp32 scalar);
    an fp32 `losses` [T] is told those of each token.
    forward(…, chunk=c, x=[t, D]) runs chunk c alone: from x, what the chunk before made, to what the next one needs, or
    to the loss.
    logits(ids [T], doc) -> [T, vocab_size] fp32.
    """

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, ends: Axis | None = None,
                 chunks: tuple[Chunk, ...] | None = None, sequence_parallel: bool = False,
                 recompute_mode: Recompute = "none"):  # fmt: skip
        super().__init__()
        require(config.num_experts == 0, f"{config.model_type} with {config.num_experts} experts cannot be trained yet")
        self.tp, self.ops, self.sequence_parallel = tp, ops, sequence_parallel
        self.chunks = chunks or place(config, 1)[0]
        self.enter_head = comm.gather_rows if sequence_parallel else comm.enter_region
        ends = ends if config.tie_word_embeddings else None
        self.model = Decoder(config, tp, ops, chunks=self.chunks, ends=ends, sequence_parallel=sequence_parallel,
                             recompute_mode=recompute_mode)  # fmt: skip
        if self.chunks[-1].last and not (config.tie_word_embeddings and self.chunks[0].first):
            self.lm_head = VocabRows(config.vocab_size, config.padded_vocab_size(tp.size), config.hidden_size, tp, ends)

    @property
    def head(self) -> VocabRows:
        """The matrix that reads logits out: the embedding itself when tied and on the same rank."""
        return getattr(self, "lm_head", None) or self.model.embed_tokens

    def forward(self, ids_T: Tensor, labels_T: Tensor, doc: Documents, losses: Tensor | None = None, *,
                chunk: int = 0, x: Tensor | None = None) -> Tensor:  # fmt: skip
        x_tD = self.model(ids_T, doc, self.chunks[chunk], x)
        if not self.chunks[chunk].last:
            return x_tD
        return linear_cross_entropy(self.enter_head(x_tD, self.tp), self.head, labels_T, self.ops, losses_T=losses)

    def logits(self, ids_T: Tensor, doc: Documents, at: Tensor | None = None, *,
               chunk: int = 0, x: Tensor | None = None) -> Tensor:  # fmt: skip
        """Logits of every id of the vocabulary at every token, or at those numbered `at`; `chunk` is the last one."""
        x_TD = self.enter_head(self.model(ids_T, doc, self.chunks[chunk], x), self.tp)
        return logits(x_TD if at is None else x_TD[at], self.head)


def build(config: ModelConfig, tp: Axis, ops: Ops, *, dtype: torch.dtype, **layout: Any) -> Transformer:
    """The model on the meta device: shapes only, until flat buffers give its parameters memory. `layout` as above."""
    with torch.device("meta"):
        model = Transformer(config, tp, ops, **layout)
    return model.to(dtype)


def build_rank(config: ModelConfig, ctx: ParallelContext, ops: Ops, parallel: Parallel,
               dtype: torch.dtype) -> Transformer:  # fmt: skip
    """What this rank holds of the model, on the meta device."""
    ops = replace(ops, attention=attention_over(ctx.cp, ops, parallel.cp_attention))
    return build(
        config, ctx.tp, ops, dtype=dtype, ends=ctx.ends,
        chunks=place(config, ctx.pp.size, parallel.virtual_stages)[ctx.pp.rank],
        sequence_parallel=parallel.sequence_parallel and ctx.tp.size > 1, recompute_mode=parallel.recompute,
    )  # fmt: skip


def named_pieces(model: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Parameter name in the module tree -> the named rectangles it holds, in registration order."""
    table = {}
    for name, module in model.named_modules():
        if hasattr(module, "pieces"):
            table.update({f"{name}.{parameter}": pieces for parameter, pieces in module.pieces(name).items()})
    missing = [name for name, _ in model.named_parameters() if name not in table]
    assert not missing, f"parameters without pieces: {missing}"
    return table
