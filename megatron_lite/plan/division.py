"""What a step gives each rank: tokens, micro-batches, blocks and parameters. Pure arithmetic over placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel, Stage
from megatron_lite.models.placement import Chunk, place
from megatron_lite.models.shapes import Shape, layer_matmul_parameters, layer_shapes
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.schedule import live, order


class Division(NamedTuple):
    """Sizes of a step, the same on every rank."""

    tokens: int  # of a micro-batch on one rank: rows x seq_len / cp
    micro_batches: int  # of each data-parallel rank
    data_ranks: int  # dp x cp: ZeRO-1 shards dense parameters over them
    expert_data_ranks: int
    bytes_per_element: int  # of weights and activations


class Parameters(NamedTuple):
    """Elements of parameters one rank holds, vocabulary padding included."""

    dense: int  # sharded over dp x cp by ZeRO-1
    experts: int  # sharded over edp

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


class PipelineRank(NamedTuple):
    """What one pp rank holds; equal for all ranks of its tp, cp and dp axes."""

    rank: int
    chunks: tuple[int, ...]  # blocks of each
    first: bool  # embeds the ids
    last: bool  # final norm, head and loss
    parameters: Parameters
    matrices: int  # elements a token is multiplied with here, over all tp ranks

    @property
    def blocks(self) -> int:
        """Of all chunks."""
        return sum(self.chunks)


class BlockSizes(NamedTuple):
    """Elements of one block."""

    dense: int  # on a tp rank
    experts: int  # all experts, whole
    matrices: int  # a token is multiplied with, over all tp ranks


def divide(stage: Stage, parallel: Parallel, grid: Grid, bytes_per_element: int) -> Division:
    """Sizes of a step of `stage`."""
    return Division(
        tokens=stage.micro_batch * stage.seq_len // parallel.cp,
        micro_batches=stage.rows_per_step // (stage.micro_batch * grid.dp),
        data_ranks=grid.dp * parallel.cp,
        expert_data_ranks=grid.dp * parallel.cp * parallel.tp // parallel.ep,
        bytes_per_element=bytes_per_element,
    )


def pipeline_ranks(model: ModelConfig, parallel: Parallel) -> tuple[PipelineRank, ...]:
    """What every pp rank holds."""
    places = place(model, parallel.pp, parallel.virtual_stages)
    return hold(model, parallel, places, block_sizes(model, parallel.tp))


def hold(
    model: ModelConfig, parallel: Parallel, places: Sequence[Sequence[Chunk]], block: BlockSizes
) -> tuple[PipelineRank, ...]:
    """The same from a placement and the sizes of a block, for who asks often."""
    vocabulary = vocab_rows(model, parallel.tp) * model.hidden_size
    final_norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    ranks = []
    for rank, chunks in enumerate(places):
        first, last = chunks[0].first, chunks[-1].last
        blocks = sum(len(chunk.layers) for chunk in chunks)
        matrices = first + last - (first and last and model.tie_word_embeddings)  # a tied one is at both ends
        dense = blocks * block.dense + matrices * vocabulary + last * final_norm
        ranks.append(
            PipelineRank(
                rank=rank,
                chunks=tuple(len(chunk.layers) for chunk in chunks),
                first=first,
                last=last,
                parameters=Parameters(dense, blocks * block.experts // parallel.ep),
                matrices=blocks * block.matrices + last * model.vocab_size * model.hidden_size,
            )
        )
    return tuple(ranks)


def kinds(ranks: Sequence[PipelineRank]) -> list[tuple[PipelineRank, int]]:
    """Ranks that hold different things, each as the first of its kind, with how many there are of it.

    Of equal ranks the first keeps the most micro-batches, so what is the most of these is the most of all.
    """
    found: dict[tuple[tuple[int, ...], bool, bool], list[PipelineRank]] = {}
    for rank in ranks:
        found.setdefault((rank.chunks, rank.first, rank.last), []).append(rank)
    return [(same[0], len(same)) for same in found.values()]


def block_sizes(model: ModelConfig, tp: int) -> BlockSizes:
    """Elements of a block. KV heads fewer than tp are held by several ranks, experts are never cut."""
    dense = experts = 0
    for name, shape in layer_shapes(model, model.layers[0]).items():
        if ".experts." in name:
            experts += shape.numel
        else:
            dense += _on_rank(name, shape, model, tp)
    return BlockSizes(dense, experts, layer_matmul_parameters(model, model.layers[0]))


def vocab_rows(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding or the head on one tp rank, padding included."""
    return model.padded_vocab_size(tp) // tp


def rank_parameters(model: ModelConfig, parallel: Parallel) -> Parameters:
    """Parameters of the pp rank that holds the most."""
    return max((rank.parameters for rank in pipeline_ranks(model, parallel)), key=lambda held: held.total)


def live_blocks(pp: int, rank: PipelineRank, micro_batches: int) -> int:
    """Blocks whose forward has been and whose backward is still to come, counted once per micro-batch, at most."""
    chunks = len(rank.chunks)
    if len(set(rank.chunks)) == 1:
        return live(pp, rank.rank, chunks, micro_batches) * rank.chunks[0]
    now = most = 0
    # What is alive repeats after pp micro-batches; the warm-up is over after two rounds of them.
    for task in order(pp, rank.rank, chunks, min(micro_batches, 3 * pp)):
        now += rank.chunks[task.chunk] * (1 if task.kind == "forward" else -1)
        most = max(most, now)
    return most


def _on_rank(name: str, shape: Shape, model: ModelConfig, tp: int) -> int:
    """Elements of one parameter of a block on a rank."""
    cut_biases = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    if shape.kind in ("norm", "norm_bias", "qk_norm", "router"):
        return shape.numel
    if shape.kind == "bias" and not any(part in name for part in cut_biases):
        return shape.numel
    if "k_proj" in name or "v_proj" in name:
        return shape.numel // min(tp, model.num_key_value_heads)
    return shape.numel // tp
