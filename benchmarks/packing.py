"""Time, memory and padding of best-fit packing over documents of log-normal lengths; memory is right for one case.

python -m benchmarks.packing [DOCUMENTS MEAN_TOKENS SEQ_LEN]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from megatron_lite.data import packing

CASES = ((5_000_000, 600, 2048), (5_000_000, 1500, 2048), (5_000_000, 20_000, 65_536))
SIGMA = 1.2  # of the logarithm of a length


def measure(documents: int, mean: int, seq_len: int) -> str:
    """One line about packing so many documents of `mean` tokens into rows of `seq_len`."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, documents)
    lengths = np.maximum(drawn, 1).astype(np.int64)
    places = packing.stream_starts(lengths)[:-1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    starts, found = packing.pack(lengths, places, seq_len)
    seconds = time.perf_counter() - begin
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    padding = np.diff(starts)[found == packing.PADDING].sum() / starts[-1]
    return (
        f"{documents:,} documents, {lengths.sum():,} tokens, seq_len {seq_len:,}: {seconds:.2f} s, "
        f"peak +{memory:,.0f} MiB, {starts[-1] // (seq_len + 1):,} rows, {padding:.4%} padding"
    )


if __name__ == "__main__":
    given = tuple(int(argument) for argument in sys.argv[1:])
    for case in [given] if given else CASES:
        print(measure(*case))
