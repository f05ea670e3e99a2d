"""The whole decoder: embedding, blocks, final norm, head. One class serves StableLM and Qwen3.

Module names follow the Hugging Face keys, except that q|k|v and gate|up are one module each (`named_pieces` says which
named tensors those hold).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.errors import require
from megatron_lite.models.block import Block
from megatron_lite.models.norm import hidden_norm
from megatron_lite.models.rope import rotary_tables
from megatron_lite.ops import Ops
from megatron_lite.ops.documents import Documents
from megatron_lite.parallel import comm, recompute
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.cross_entropy import linear_cross_entropy, logits
from megatron_lite.parallel.embedding import VocabParallelEmbedding, VocabRows
from megatron_lite.parallel.shard import Piece


class Decoder(nn.Module):
    """ids [T] -> normed hidden states [t, D]."""

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, sequence_parallel: bool,
                 recompute_mode: Literal["none", "selective", "full"]):  # fmt: skip
        super().__init__()
        self.config = config
        self.wrap_block, wrap_core = recompute.policy(recompute_mode)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.padded_vocab_size(tp.size), config.hidden_size, tp,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.layers = nn.ModuleList(
            Block(config, tp, ops, sequence_parallel=sequence_parallel, recompute_core=wrap_core) for _ in config.layers
        )
        self.norm = hidden_norm(config, tp, ops, sequence_parallel=sequence_parallel)

    def forward(self, ids_T: Tensor, doc: Documents) -> Tensor:
        rotary = rotary_tables(self.config, doc.position_ids)
        x_tD = self.embed_tokens(ids_T)
        for block in self.layers:
            x_tD = self.wrap_block(block, x_tD, rotary, doc)
        return self.norm(x_tD)


class Transformer(nn.Module):
    """A causal language model on one tensor-parallel axis.

    forward(ids [T], labels [T], doc) -> sum of the cross-entropies of labels that are not negative (fp32 scalar);
    an fp32 `losses` [T] is told those of each token.
    logits(ids [T], doc) -> [T, vocab_size] fp32.
    """

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, sequence_parallel: bool = False,
                 recompute_mode: Literal["none", "selective", "full"] = "none"):  # fmt: skip
        super().__init__()
        require(config.num_experts == 0, f"{config.model_type} with {config.num_experts} experts cannot be trained yet")
        self.tp, self.ops = tp, ops
        self.enter_head = comm.gather_rows if sequence_parallel else comm.enter_region
        self.model = Decoder(config, tp, ops, sequence_parallel=sequence_parallel, recompute_mode=recompute_mode)
        if not config.tie_word_embeddings:
            self.lm_head = VocabRows(config.vocab_size, config.padded_vocab_size(tp.size), config.hidden_size, tp)

    @property
    def head(self) -> VocabRows:
        """The matrix that reads logits out: the embedding itself when tied."""
        return getattr(self, "lm_head", self.model.embed_tokens)

    def forward(self, ids_T: Tensor, labels_T: Tensor, doc: Documents, losses: Tensor | None = None) -> Tensor:
        x_TD = self.enter_head(self.model(ids_T, doc), self.tp)
        return linear_cross_entropy(x_TD, self.head, labels_T, self.ops, losses_T=losses)

    def logits(self, ids_T: Tensor, doc: Documents, at: Tensor | None = None) -> Tensor:
        """Logits of every id of the vocabulary at every token, or at those numbered `at`."""
        x_TD = self.enter_head(self.model(ids_T, doc), self.tp)
        return logits(x_TD if at is None else x_TD[at], self.head)


def build(config: ModelConfig, tp: Axis, ops: Ops, *, dtype: torch.dtype, sequence_parallel: bool = False,
          recompute_mode: Literal["none", "selective", "full"] = "none") -> Transformer:  # fmt: skip
    """The model on the meta device: shapes only, until flat buffers give its parameters memory."""
    with torch.device("meta"):
        model = Transformer(config, tp, ops, sequence_parallel=sequence_parallel, recompute_mode=recompute_mode)
    return model.to(dtype)


def named_pieces(model: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """Parameter name in the module tree -> the named rectangles it holds, in registration order."""
    table = {}
    for name, module in model.named_modules():
        if hasattr(module, "pieces"):
            table.update({f"{name}.{parameter}": pieces for parameter, pieces in module.pieces(name).items()})
    missing = [name for name, _ in model.named_parameters() if name not in table]
    assert not missing, f"parameters without pieces: {missing}"
    return table
