"""Facts about parameters: which rectangle of which named tensor a rank holds, and where it lies.

A parameter in memory may be cut, merged with others (q|k|v) or padded; on disk there are only whole tensors under
their Hugging Face names. `Piece` is the bridge, and the only one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A rectangle of a named tensor, stored row-major and contiguous from `offset` of some flat storage."""

    name: str  # Hugging Face key
    whole: tuple[int, ...]  # shape of the named tensor on disk
    start: tuple[int, ...]  # first index of the rectangle in it
    shape: tuple[int, ...]  # extent of the rectangle
    offset: int = 0  # elements before it in the storage
    copies: int = 1  # ranks of `axis` that hold this same rectangle, all of them
    copy: int = 0  # which of them this is; copy 0 owns it (is counted, and saved)
    partial_grad: bool = False  # each copy computes a share of the gradient; the shares are summed over the copies
    axis: str = "tp"  # "tp", "kv" (tp ranks that share kv heads) or "ends" (first and last pp rank)

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    def moved(self, by: int) -> Piece:
        """The same rectangle, `by` elements further into a larger storage."""
        return replace(self, offset=self.offset + by)


@dataclass(frozen=True)
class FlatShard:
    """One rank's range [lo, hi) of a flat bucket: what ZeRO-1 updates, and what a checkpoint stores.

    Elements of the bucket that no piece covers are padding. A copy of a piece lies in a bucket of the same size, at the
    same place and with the same range on every rank that holds one.
    """

    bucket: str  # unique within the rank, equal over data-parallel ranks
    pieces: tuple[Piece, ...]  # of the whole bucket, ascending offsets
    size: int  # elements of the whole bucket, padding included
    lo: int
    hi: int
    tensors: dict[str, Tensor]  # "master", "exp_avg", "exp_avg_sq": fp32, hi - lo elements each
