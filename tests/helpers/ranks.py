"""Run a function on several gloo ranks: `run_ranks(fn, world_size, *args, tp=2, …)` calls fn(ctx, *args) on each.

`fn` lives at module level of a test file. A fork server with torch preloaded makes a rank start in a fraction of a
second; the first rank that fails fails the test with its traceback, and ranks that hang are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lite.parallel.context import build_context, single_process
from megatron_lite.parallel.grid import Grid

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch._dynamo", "torch.optim", "torch.distributed", "numpy", "pydantic"])


def _child(
    rank: int,
    world: int,
    store: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    layout: dict[str, int],
    results: Any,
) -> None:
    try:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        ctx = build_context(Grid(world, **layout), rank=rank, device=torch.device("cpu"), timeout_s=60.0)
        results.put((rank, None, pickle.dumps(fn(ctx, *args))))  # by value: torch would share memory that ends here
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 whatever it was, the test shows it
        results.put((rank, traceback.format_exc(), None))


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0, **layout: int) -> list[Any]:
    """Results of fn(ctx, *args) by rank; `layout` are the axis sizes of a Grid. World 1 runs in this process."""
    if world == 1:
        assert Grid(1, **layout).dp == 1
        return [fn(single_process(), *args)]
    with tempfile.TemporaryDirectory() as folder:
        results = _SERVER.Queue()
        store = os.path.join(folder, "store")
        ranks = [
            _SERVER.Process(target=_child, args=(rank, world, store, fn, args, layout, results), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(answers) < world:
                try:
                    rank, error, value = results.get(timeout=max(0.1, min(1.0, deadline - time.monotonic())))
                except queue.Empty:
                    dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in answers]
                    if dead or time.monotonic() > deadline:
                        pytest.fail(
                            f"ranks {dead} died"
                            if dead
                            else f"no answer within {timeout_s} s from {set(range(world)) - set(answers)}"
                        )
                    continue
                if error is not None:
                    pytest.fail(f"rank {rank} of {world}:\n{error}")
                answers[rank] = pickle.loads(value)
            for process in ranks:
                process.join(10)
        finally:
            for process in ranks:
                process.kill()
        return [answers[rank] for rank in range(world)]
