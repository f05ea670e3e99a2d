"""Which ranks share which axis: pure arithmetic over rank numbers.

Two factorisations of the same ranks, the last axis varying fastest:
  dense   (pp, dp, cp, tp)   tp neighbours are neighbouring ranks, so they share a node
  experts (pp, edp, ep)      edp * ep = dp * cp * tp
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.errors import require


@dataclass(frozen=True)
class Grid:
    """Sizes of all axes; dp and edp are what remains of the world."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    kv_replicas: int = 1  # neighbouring tp ranks that hold the same kv heads

    def __post_init__(self) -> None:
        block = self.pp * self.cp * self.tp
        require(
            self.world % block == 0,
            f"world_size={self.world} is not divisible by pp*cp*tp={self.pp}*{self.cp}*{self.tp}={block}; "
            f"change [parallel] or start a multiple of {block} ranks",
        )
        within = self.world // self.pp
        require(within % self.ep == 0, f"ep={self.ep} does not divide the {within} ranks of a pipeline rank")
        require(self.tp % self.kv_replicas == 0, f"kv_replicas={self.kv_replicas} does not divide tp={self.tp}")

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world // (self.pp * self.cp * self.tp)

    def rows(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of one axis, each a tuple of ranks in axis order; together they hold every rank once.

        Axes: world, pp, dp, cp, tp, data (dp x cp: ranks that see different tokens), kv, ep, edp, and ends (the first
        and the last of each pp group; those between stand alone).
        """
        if axis == "ends":
            inner = [(rank,) for row in self.rows("pp") for rank in row[1:-1]]
            return [(row[0], *row[1:][-1:]) for row in self.rows("pp")] + inner
        dense, experts = (self.pp, self.dp, self.cp, self.tp), (self.pp, self.world // self.pp // self.ep, self.ep)
        split_tp = (self.pp, self.dp, self.cp, self.tp // self.kv_replicas, self.kv_replicas)
        sizes, moving = {
            "world": (dense, (0, 1, 2, 3)),
            "pp": (dense, (0,)),
            "dp": (dense, (1,)),
            "cp": (dense, (2,)),
            "tp": (dense, (3,)),
            "data": (dense, (1, 2)),
            "kv": (split_tp, (4,)),
            "edp": (experts, (1,)),
            "ep": (experts, (2,)),
        }[axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = coordinates(rank, sizes)
            fixed = tuple(p for dim, p in enumerate(place) if dim not in moving)
            found.setdefault(fixed, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]


def coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Place of `rank` on a grid whose last axis varies fastest."""
    place = []
    for size in reversed(sizes):
        place.append(rank % size)
        rank //= size
    return tuple(reversed(place))


def kv_replicas(num_key_value_heads: int, tp: int) -> int:
    """Tensor-parallel ranks that share each kv head: 1 unless tp exceeds the heads."""
    return max(1, tp // num_key_value_heads)
