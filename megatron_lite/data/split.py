"""Parts of one corpus, by documents: contiguous, disjoint, and together the whole."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from megatron_lite.errors import DataError, require


def parts(num_documents: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """First document of each part and one past its last, in the proportion of `weights` (0.1 is taken as 1/10).

    A part ends at its share of the documents, rounded to the nearest. DataError where a weight above 0 gets none.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    ends = [int(num_documents * share / total + Fraction(1, 2)) for share in accumulate(exact)]
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    shown = ", ".join(f"{weight:g}" for weight in weights)
    for part, (weight, (first, last)) in enumerate(zip(weights, spans, strict=True)):
        require(
            first < last or weight == 0,
            f"split [{shown}] leaves part {part} none of the {num_documents} documents, though its weight is "
            f"{weight:g}; give it more, or set it to 0",
            DataError,
        )
    return spans
