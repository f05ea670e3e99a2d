"""A model's parameters as views of a few flat buckets.

Buckets are filled from the last parameter to the first, the order in which gradients become ready, one open bucket per
class. Classes differ in weight decay (one-dimensional parameters have none) and in which other ranks hold the parameter
whole: none ("sharded"), those of the tp axis, or those of the two ends of a pipeline. Each bucket has a base tensor,
hence a version counter, of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lite.parallel.shard import Piece

ALIGN = 64  # elements: each parameter begins at a multiple, so that kernels see aligned rows


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket."""

    parameter: str  # name in the module tree
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """What one bucket holds, before it has memory."""

    decay: bool
    held: str  # "sharded", or the axis whose ranks all hold these parameters whole
    slots: tuple[Slot, ...]
    size: int  # padded


def plan_buckets(parameters: Sequence[tuple[str, int, bool, str]], limit: int, multiple: int) -> list[BucketPlan]:
    """(name, elements, decay, held) in registration order -> buckets in the order their gradients complete.

    A bucket closes when it reaches `limit` elements; sizes are padded to `multiple`. Pure.
    """
    open_buckets: dict[tuple[bool, str], list[tuple[int, str, int]]] = {}
    closed: list[tuple[int, tuple[bool, str], list[tuple[int, str, int]]]] = []

    def close(kind: tuple[bool, str]) -> None:
        members = open_buckets.pop(kind)
        closed.append((min(index for index, _, _ in members), kind, members))

    for index, (name, numel, decay, held) in reversed(list(enumerate(parameters))):
        kind = (decay, held)
        open_buckets.setdefault(kind, []).append((index, name, numel))
        if sum(n for _, _, n in open_buckets[kind]) >= limit:
            close(kind)
    for kind in list(open_buckets):
        close(kind)

    plans = []
    for _, (decay, held), members in sorted(closed, key=lambda bucket: -bucket[0]):
        slots, end = [], 0
        for _, name, numel in sorted(members):
            slots.append(Slot(name, end, numel))
            end += -(-numel // ALIGN) * ALIGN
        plans.append(BucketPlan(decay, held, tuple(slots), -(-end // multiple) * multiple))
    return plans


@dataclass(frozen=True)
class Bucket:
    """One flat base, and what of which named tensors lies in it."""

    name: str
    decay: bool
    held: str
    slots: tuple[Slot, ...]
    pieces: tuple[Piece, ...]  # offsets within the bucket
    base: Tensor  # the weights, flat


class FlatWeights:
    """Gives a model built on meta its memory: parameters become views of flat buckets of the model's dtype, zeroed."""

    def __init__(self, model: nn.Module, table: dict[str, tuple[Piece, ...]], device: torch.device, *,
                 bucket_elements: int, multiple: int = 1):  # fmt: skip
        parameters = dict(model.named_parameters())
        described = [(name, p.numel(), p.dim() > 1, _held(table[name])) for name, p in parameters.items()]
        self.buckets: list[Bucket] = []
        self.parameters: dict[str, nn.Parameter] = {}
        for i, plan in enumerate(plan_buckets(described, bucket_elements, multiple)):
            base = torch.zeros(plan.size, dtype=next(iter(parameters.values())).dtype, device=device)
            pieces = []
            for slot in plan.slots:
                view = base[slot.offset : slot.offset + slot.numel].view(parameters[slot.parameter].shape)
                self.parameters[slot.parameter] = _replace(model, slot.parameter, nn.Parameter(view))
                pieces += [piece.moved(slot.offset) for piece in table[slot.parameter]]
            kind = f"{'decay' if plan.decay else 'no-decay'}-{plan.held}"
            self.buckets.append(Bucket(f"{i:03d}-{kind}", plan.decay, plan.held, plan.slots, tuple(pieces), base))
        self._where: dict[str, list[tuple[int, Piece]]] = {}
        for i, bucket in enumerate(self.buckets):
            for piece in bucket.pieces:
                self._where.setdefault(piece.name, []).append((i, piece))

    @property
    def names(self) -> list[str]:
        """Names of the tensors of which this rank holds a rectangle."""
        return list(self._where)

    def cut(self, name: str, whole: Tensor) -> Iterable[tuple[int, Piece, Tensor]]:
        """(bucket index, piece, its values flat) for every rectangle of the named tensor that this rank holds."""
        for i, piece in self._where.get(name, ()):
            assert tuple(whole.shape) == piece.whole, f"{name}: {tuple(whole.shape)} is not {piece.whole}"
            region = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            yield i, piece, whole[region].reshape(-1)

    @torch.no_grad()
    def fill(self, name: str, whole: Tensor) -> None:
        """Set this rank's rectangles of a named tensor."""
        for i, piece, values in self.cut(name, whole):
            self.buckets[i].base[piece.offset : piece.offset + piece.numel] = values.to(self.buckets[i].base)


def _held(pieces: tuple[Piece, ...]) -> str:
    """The axis whose ranks all hold a parameter whole; one with parts of its own on every rank is "sharded"."""
    return pieces[0].axis if len(pieces) == 1 and pieces[0].copies > 1 else "sharded"


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Put `parameter` where the module tree has the one of this name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)
    return parameter
