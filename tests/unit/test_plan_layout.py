"""Layouts that a search proposes and estimates, against published throughput, its own rules and brute force."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from megatron_lite.config.check import check
from megatron_lite.config.load import load_recipe
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Parallel, Recipe
from megatron_lite.parallel.grid import Grid
from megatron_lite.pipeline.schedule import bubble, order
from megatron_lite.plan.devices import DEVICES
from megatron_lite.plan.division import live_blocks, pipeline_ranks, rank_parameters
from megatron_lite.plan.layout import recipe_with, search
from megatron_lite.plan.run import describe, plan_stage
from megatron_lite.plan.speed import bandwidth
from megatron_lite.plan.traffic import bytes_per_step
from tests.helpers.recipes import read

ROOT = Path(__file__).parents[2]
STABLELM = ROOT / "examples" / "stablelm_3b" / "recipe.toml"
STABLELM_PUBLISHED, MPT_3B = 6028, 8777  # tokens/s of one A100-40: recomputing every layer, and nothing

EVEN = ("stages.0.seq_len=64", "stages.0.batch_tokens=1024", "stages.1.batch_tokens=4032")


def _of(name: str, rows: int, seq_len: int = 4096) -> Recipe:
    stage = f"{{name='a', steps=10, seq_len={seq_len}, batch_tokens={rows * seq_len}, micro_batch=1, "
    return read(f"model.preset={name}", "precision=bf16", f"stages=[{stage}blend={{prose=1}}, lr={{peak=1e-3}}}}]")


# --- against published numbers ---


def test_stablelm_as_it_was_trained_is_estimated_between_its_own_and_the_best_published_throughput():
    layouts, _ = search(load_recipe(STABLELM), 0, 256, DEVICES["A100-40"])
    (published,) = [
        x for x in layouts if x.grid.dp == 256 and x.micro_batch == 4 and x.parallel.recompute == "full"
    ]  # fmt: skip
    assert STABLELM_PUBLISHED < published.tokens_per_s / 256 < MPT_3B


@pytest.mark.parametrize(("device", "published"), [("A100-40", 8777), ("A100-80", 9457), ("H100", 20964)])
def test_a_3b_on_eight_gpus_is_estimated_within_15_percent_of_llm_foundry(device, published):
    layouts, _ = search(_of("stablelm-3b-4e1t", rows=1024), 0, 8, DEVICES[device])
    assert layouts[0].tokens_per_s / 8 == pytest.approx(published, rel=0.15)


def test_a_32b_on_eight_a100_40_does_not_fit_and_the_number_is_said():
    layouts, rejected = search(_of("qwen3-32b", rows=64), 0, 8, DEVICES["A100-40"])
    alone = [x for x in rejected if (x.parallel.tp, x.parallel.pp, x.parallel.cp) == (1, 1, 1)]
    assert alone and {x.reason for x in alone} == {"too little memory"}
    # weights in bf16, gradients in fp32 and an eighth of the optimizer, 7.5 bytes an element, before any activation
    needed = min(float(x.message.split(" GB")[0]) for x in alone)
    assert 7.5 * 32.76 < needed < 1.5 * 7.5 * 32.76
    assert all(layout.parallel.tp * layout.parallel.pp > 1 for layout in layouts)


# --- what a search promises ---


@pytest.mark.parametrize("world", range(1, 13))
def test_every_layout_of_a_small_world_obeys_the_rules_and_every_other_has_a_reason(world):
    recipe = read(*EVEN)
    layouts, rejected = search(recipe, 0, world, DEVICES["A100-40"])
    for layout in layouts:
        assert check(recipe_with(recipe, 0, layout, world), world, stage=0, planned=True) == []
        assert layout.grid.dp * layout.parallel.tp * layout.parallel.pp * layout.parallel.cp == world
    assert all(x.reason and x.message for x in rejected)
    said = {x.parallel.model_copy(update={"recompute": "none"}): x.message for x in rejected}
    for parallel, message in list(said.items())[:20]:
        changed = recipe.model_copy(update={"parallel": parallel})
        assert any(message.split(": ", 1)[-1].split(";")[0] in found for found in check(changed, world, stage=0)) or (
            "micro_batch" in message or "micro-batch" in message
        )
    speeds = [layout.tokens_per_s for layout in layouts]
    assert speeds == sorted(speeds, reverse=True)
    assert world not in (1, 2, 4, 8) or layouts


@pytest.mark.parametrize("change", ["network", "node_link", "memory_speed"])
@pytest.mark.parametrize("factor", [1.01, 3.0, 100.0])
def test_faster_hardware_is_never_slower(change, factor):
    recipe = _of("qwen3-8b", rows=16)
    device = DEVICES["A100-40"]
    faster = device._replace(**{change: getattr(device, change) * factor})
    speeds = [
        {(x.parallel, x.micro_batch): x.tokens_per_s for x in search(recipe, 0, 16, d)[0]} for d in (device, faster)
    ]
    assert speeds[0] and speeds[0].keys() == speeds[1].keys()
    assert all(speeds[1][key] >= speed * (1 - 1e-9) for key, speed in speeds[0].items())


def test_overlap_is_never_slower_than_none():
    fast, slow = (
        read(*EVEN, f"parallel={{pp=2, world_size=4, overlap_gradients={on}, overlap_weights={on}, "
             f"overlap_pipeline={on}}}") for on in ("true", "false")
    )  # fmt: skip
    times = [plan_stage(recipe, 0, 4).time for recipe in (fast, slow)]
    assert times[0].dp < times[1].dp and times[0].total < times[1].total


def test_256_ranks_take_seconds():
    begin = time.perf_counter()
    layouts, rejected = search(load_recipe(STABLELM), 0, 256, DEVICES["A100-40"])
    assert len(layouts) + len(rejected) > 10_000
    assert time.perf_counter() - begin < 30  # 3 s on an idle core


# --- the parts ---


def test_axes_use_the_link_their_ranks_are_connected_by():
    device = DEVICES["A100-40"]._replace(reached=1.0)
    grid = Grid(256, tp=4, pp=4, cp=2)
    assert bandwidth("tp", grid, device) == bandwidth("cp", grid, device) == device.node_link
    # data ranks: 2 of each group in a node, so a ring has two shares of the network
    assert bandwidth("dp", grid, device) == 2 * device.network
    assert bandwidth("pp", grid, device) == device.network
    assert bandwidth("dp", Grid(256), device) == 8 * device.network
    assert bandwidth("dp", Grid(8), device) == device.node_link
    assert bandwidth("pp", Grid(8, pp=8), device) == device.node_link


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_live_blocks_are_those_of_the_schedule(pp, virtual):
    model = ModelConfig(**PRESETS["tiny-qwen3"] | {"num_hidden_layers": 13, "vocab_size": 250})
    for micro_batches in range(pp, 8 * pp + 1, pp):
        for at in pipeline_ranks(model, Parallel(pp=pp, virtual_stages=virtual)):
            now = most = 0
            for task in order(pp, at.rank, virtual, micro_batches):
                now += at.chunks[task.chunk] if task.kind == "forward" else -at.chunks[task.chunk]
                most = max(most, now)
            assert live_blocks(pp, at, micro_batches) == most


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-stablelm", "qwen3-30b-a3b"])
def test_pipeline_ranks_hold_the_model_once_and_a_tied_matrix_twice(name):
    model = ModelConfig(**PRESETS[name])
    whole = rank_parameters(model, Parallel()).total
    tied = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    for pp in (2, 3, 4):
        ranks = pipeline_ranks(model, Parallel(pp=pp))
        assert sum(at.parameters.total for at in ranks) == whole + tied
        assert [at.first for at in ranks] == [True] + [False] * (pp - 1)
        assert [at.last for at in ranks] == [False] * (pp - 1) + [True]


SIZES = {"zero": 1, "tokens": 64, "micro_batches": 6, "data_ranks": 1, "expert_data_ranks": 1, "bytes_per_element": 4}


def _sent(**parallel: object) -> dict[str, int]:
    return bytes_per_step(ModelConfig(**PRESETS["tiny-qwen3"]), Parallel.model_validate(parallel), **SIZES)


def test_pipeline_messages_are_counted_by_micro_batch_and_border():
    hidden, matrix = 64 * 128 * 4, 2048 * 128 * 4  # the model is tied
    both = {"pp: gradient of the tied matrix, over both ends": matrix}
    # Of two ranks each sends one way, of four the inner ones send both ways, as do two ranks with chunks in between.
    assert _sent(pp=2) == {"pp: activations and their gradients": 6 * hidden} | both
    assert _sent(pp=4) == {"pp: activations and their gradients": 12 * hidden} | both
    assert _sent(pp=2, virtual_stages=2) == {"pp: activations and their gradients": 18 * hidden} | both


@pytest.mark.parametrize(
    ("method", "recompute", "blocks_sent"),
    [("gather", "none", 2), ("gather", "selective", 3), ("ring", "none", 3), ("ring", "full", 4)],
)
def test_context_ranks_send_keys_and_values_as_often_as_their_method_needs(method, recompute, blocks_sent):
    (sent,) = _sent(cp=4, cp_attention=method, recompute=recompute).values()
    keys_values = 2 * 64 * 2 * 32 * 4  # of this rank's 64 tokens: 2 kv heads of 32 dims
    assert sent == 6 * 4 * blocks_sent * 3 * keys_values


def test_context_ranks_that_exchange_heads_send_all_but_their_own():
    (sent,) = _sent(cp=2, cp_attention="heads").values()
    queries_and_outputs, keys_values = 2 * 64 * 4 * 32 * 4, 2 * 64 * 2 * 32 * 4
    assert sent == 6 * 4 * 2 * (queries_and_outputs + keys_values) // 2  # a half leaves, forward and backward


def test_a_pipeline_is_reported_with_its_bubble_live_micro_batches_and_fullest_rank():
    recipe = read(*EVEN, "parallel.pp=4")
    report = describe(recipe, [0], 4)
    assert "blocks of each pp rank                   1, 1, 1, 1" in report
    assert f"bubble                                   {bubble(4, 1, 16):.1%} of a step" in report
    assert "most live micro-batches of each pp rank  4, 3, 2, 1" in report
    plan = plan_stage(recipe, 0, 4)
    assert plan.fullest in (0, 3) and f"pp rank {plan.fullest}, the fullest" in report


def test_nothing_is_sent_below_the_least():
    for options in ("tp=2", "tp=2, sequence_parallel=true, recompute='full'", "cp=2", "cp=2, cp_attention='heads'",
                    "pp=2", "pp=2, virtual_stages=2", "tp=2, pp=2"):  # fmt: skip
        for flow in plan_stage(read(*EVEN, f"parallel={{{options}, world_size=8}}"), 0, 8).flows:
            assert 0 < flow.least <= flow.sent, (options, flow)


def test_the_tool_needs_no_torch_and_prints_a_section_that_reads_back():
    code = (
        "import runpy, sys\nsys.modules['torch'] = None\n"
        "sys.argv = ['plan_layout.py', *sys.argv[1:]]\nrunpy.run_path('tools/plan_layout.py', run_name='__main__')"
    )
    arguments = ["--recipe", str(STABLELM), "--world-size", "16", "--device", "H100", "--efficiency", "0.5"]
    done = subprocess.run([sys.executable, "-c", code, *arguments, "--rejected"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "matrix products at 50% of 989 TFLOP/s" in done.stdout
    section = tomllib.loads(done.stdout[done.stdout.index("[parallel]") :])
    assert section["parallel"]["world_size"] == 16
    counted = [int(line.split()[0].replace(",", "")) for line in done.stdout.splitlines() if " cannot run: " in line]
    layouts, rejected = search(load_recipe(STABLELM), 0, 16, DEVICES["H100"])
    assert sum(counted) == len(rejected)
    assert f"{len(layouts):,} layouts can run, {len(rejected):,} cannot" in done.stdout
