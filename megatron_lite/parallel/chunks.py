"""How many tokens go through the head at a time. Pure: the plan of a run asks it too."""

from __future__ import annotations

CHUNK_BYTES = 128 * 2**20  # of fp32 logits


def chunk_tokens(tokens: int, d_model: int, vocab_rows: int) -> int:
    """Tokens of one chunk: as many as give CHUNK_BYTES of fp32 logits [C, vocab_rows], but at least d_model / 2.

    Each chunk reads and writes the head's whole fp32 gradient [vocab_rows, d_model]; with d_model / 2 tokens that
    traffic stays small beside the products, and the logits take half the memory of that gradient.
    """
    return max(1, min(tokens, max(CHUNK_BYTES // (4 * vocab_rows), d_model // 2)))
