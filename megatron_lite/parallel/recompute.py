"""What a forward keeps for its backward, and what it computes again. The same numbers to the bit either way.

none      : keep everything
selective : keep the outputs of the matrix products that are dear to redo; redo the attention core (q/k norms,
            rotation, attention) and the activation with the product after it
full      : keep only each block's input
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "selective", "full"]
Wrap = Callable[..., Any]  # wrap(fn, *args) = fn(*args), perhaps with less kept


def keep(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), everything kept."""
    return fn(*args)


def redo(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), only the arguments kept. Nothing here draws random numbers, so no generator state is saved."""
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def policy(mode: Recompute) -> tuple[Wrap, Wrap]:
    """(wrap for a whole block, wrap for the cores inside it)."""
    return {"none": (keep, keep), "selective": (keep, redo), "full": (redo, keep)}[mode]
