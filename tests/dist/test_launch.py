"""Process groups end with their block, and their threads with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

CODE = """
    import sys
    from pathlib import Path
    import torch
    from megatron_lite.parallel import comm
    from megatron_lite.parallel.grid import Grid
    from megatron_lite.runtime.launch import process_groups, read_launch

    def threads():
        return [t.read_text().strip() for t in Path("/proc/self/task").glob("*/comm") if "gloo" in t.read_text()]

    with process_groups(read_launch(), Grid(2, tp=2), 60.0) as ctx:
        comm.all_gather_start(torch.zeros(4), torch.ones(2), ctx.tp).wait()
        assert threads()
    print(len(threads()), flush=True)
"""


def test_no_thread_of_a_group_outlives_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", textwrap.dedent(CODE)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["0", "0"]
