"""Rules across fields: each says which numbers do not fit, and what to change."""

from __future__ import annotations

import pytest

from megatron_lite.config.check import check
from megatron_lite.config.data_rules import DATA_RECIPE_RULES, DATA_STAGE_RULES
from megatron_lite.config.layout_rules import LAYOUT_RULES
from megatron_lite.config.load import for_stage
from megatron_lite.config.rules import MODEL_RULES, RECIPE_RULES, STAGE_RULES
from tests.helpers.recipes import problems, read

# rule, options that break it, what is said
CASES = [
    ("stage_names_are_distinct", ["stages.1.name=general"], ["2 stages are called 'general'"]),
    ("stage_names_are_distinct", ['stages.1.name="1"'], ["'1' could be mistaken for a stage's number"]),
    (
        "first_stage_starts_once",
        ["init_from=a", "stages.0.start=random"],
        ["init_from = 'a' and stages.0.start = 'random' both say"],
    ),
    ("source_lengths_leave_something", ["sources.code.min_length=9", "sources.code.max_length=8"], ["9", "8"]),
    ("validation_has_no_epochs", ["validation.code={path='v', max_epochs=2}"], ["validation.code.max_epochs"]),
    ("evaluation_has_sets", ["evaluation.every=5"], ["evaluation.every=5", "no [validation.NAME]"]),
    ("query_heads_share_kv_heads_evenly", ["model.num_key_value_heads=3"], ["num_attention_heads=4", "heads=3"]),
    ("rotated_dims_are_even", ["model.head_dim=33"], ["head_dim=33", "33 dims"]),
    (
        "rotated_dims_are_even",
        ["model.preset=tiny-stablelm", "model.partial_rotary_factor=0.01"],
        ["head_dim=32 x partial_rotary_factor=0.01 rotates 0 dims"],
    ),
    ("model_type_has_its_parts", ["model.norm=layernorm"], ["model_type='qwen3' needs norm='rmsnorm'"]),
    ("model_type_has_its_parts", ["model.qk_norm=false"], ["needs qk_norm=True, not False"]),
    ("model_type_has_its_parts", ["model.preset=tiny-stablelm", "model.qk_norm=true"], ["needs qk_norm=False"]),
    ("model_type_has_its_parts", ["model.preset=tiny-stablelm", "model.attention_bias=true"], ["attention_bias=False"]),
    ("model_type_has_its_parts", ["model.preset=tiny-stablelm", "model.head_dim=30"], ["head_dim=32.0, not 30"]),
    ("model_type_has_its_parts", ["model.mlp_bias=true"], ["'qwen3' needs mlp_bias=False"]),
    ("model_type_has_its_parts", ["model.use_qkv_bias=true"], ["'qwen3' needs use_qkv_bias=False"]),
    ("model_type_has_its_parts", ["model.model_type=llama"], ["'llama' needs qk_norm=False, not True"]),
    (
        "model_type_has_its_parts",
        ["model.model_type=llama", "model.qk_norm=false", "model.hidden_size=126"],
        ["hidden_size, here 126", "num_attention_heads=4"],
    ),
    ("experts_are_complete", ["model.num_experts=8"], ["'qwen3' has no experts, but num_experts=8"]),
    (
        "experts_are_complete",
        ["model.preset=qwen3-30b-a3b", "model.num_experts_per_tok=129"],
        ["num_experts=128", "num_experts_per_tok=129"],
    ),
    ("stage_has_one_length", ["stages.0.tokens=756"], ["tokens=756 and steps=10 are both set"]),
    ("stage_has_one_length", ["stages.0.steps="], ["exactly one of tokens and steps", "neither is set"]),
    ("batch_is_whole_rows", ["stages.0.batch_tokens=700"], ["batch_tokens=700", "seq_len=63", "use 693 or 756"]),
    ("batch_is_whole_rows", ["stages.0.batch_ramp=[[1000, 64]]"], ["batch_ramp=64", "seq_len=63", "use 63 or 126"]),
    ("ramp_rises", ["stages.0.batch_ramp=[[1000, 63], [1000, 126]]"], ["have to increase", "[1000, 1000]"]),
    ("batch_is_whole_rows", ["stages.0.batch_tokens=62"], ["batch_tokens=62", "use 63"]),
    (
        "rows_divide_among_ranks",
        ["stages.0.batch_tokens=315", "parallel.world_size=2"],
        ["5 rows per step (batch_tokens 315 / seq_len 63)", "micro_batch 1 x dp 2", "batch_tokens=252 or 378"],
    ),
    ("rows_divide_among_ranks", ["stages.0.micro_batch=5"], ["12 rows per step", "micro_batch 5 x dp 1"]),
    ("rows_divide_among_ranks", ["stages.0.micro_batch=13"], ["use batch_tokens=819"]),
    ("warmup_is_given_once", ["stages.0.lr.warmup_tokens=756"], ["warmup_steps=2 and lr.warmup_tokens=756"]),
    ("decay_belongs_to_wsd", ["stages.0.lr.decay_steps=2"], ["lr.decay_steps=2 has no meaning for shape 'cosine'"]),
    ("decay_belongs_to_wsd", ["stages.0.lr.shape=wsd"], ["'wsd' needs one of", "has neither"]),
    (
        "decay_belongs_to_wsd",
        ["stages.1.lr.decay_steps=1"],
        ["lr.decay_steps=1 and lr.decay_tokens=1513"],
    ),
    ("schedule_fits_into_stage", ["stages.0.lr.warmup_steps=11"], ["11 steps of warm-up do not fit into 10 steps"]),
    (
        "schedule_fits_into_stage",  # tokens become 2 steps of warm-up and 3 of decay
        ["stages.1.lr.decay_tokens=3_025"],
        ["2 steps of warm-up and 3 of decay do not fit into 4 steps"],
    ),
    ("rate_does_not_rise_to_its_end", ["stages.0.lr.final=0.1"], ["lr.final=0.1 is above lr.peak=0.001"]),
    (
        "rate_does_not_rise_to_its_end",
        ["stages.0.lr.shape=constant", "stages.0.lr.final=1e-4"],
        ["lr.final=0.0001 has no meaning for shape 'constant'"],
    ),
    (
        "context_fits_the_positions",
        ["model.max_position_embeddings=62"],
        ["stages.0 (general): seq_len=63 is above the 62 positions"],
    ),
    (
        "context_fits_the_positions",
        [
            "model.max_position_embeddings=63",
            "stages.1.rope_theta=",
            "stages.1.rope_scaling={factor=3.9, original_max_position_embeddings=63}",
        ],
        ["stages.1 (long): seq_len=252 is above the 245 positions"],
    ),
    (
        "mixture_names_exist",
        ["stages.0.blend.prosa=1"],
        ["blend names 'prosa'", "(prose, code)", "did you mean 'prose'?"],
    ),
    ("mixture_weights_are_proportions", ["stages.0.blend.code=-1"], ["blend code=-1 is negative"]),
    ("mixture_weights_are_proportions", ["stages.1.blend.code=0"], ["stages.1 (long)", "has nothing above 0"]),
    ("mixture_weights_are_proportions", ["stages.1.blend={}"], ["blend = {} has nothing above 0"]),
    (
        "mixture_weights_are_proportions",
        ["stages.1.blend=", "stages.1.fractions.code=-0.5"],
        ["fractions code=-0.5 is"],
    ),
    ("mixture_names_exist", ["stages.1.blend=", "stages.1.fractions.coda=1"], ["fractions names 'coda'", "'code'?"]),
    ("stage_has_one_mixture", ["stages.0.blend="], ["exactly one of blend", "neither is set"]),
    (
        "stage_has_one_mixture",
        ["stages.1.fractions={code=1}"],
        ["blend={'code': 1.0}", "fractions={'code': 1.0}", "both"],
    ),
    ("best_fit_masks_documents", ["stages.0.packing=best_fit"], ["'best_fit'", "set mask_documents = true"]),
    (
        "exhaustion_needs_a_limit",
        ["sources.code.when_exhausted=stop"],
        ["sources.code: when_exhausted", "set max_epochs"],
    ),
    ("splits_have_their_part", ["sources.code.split=[9,1]"], ["sources.code: split is set but part is not"]),
    ("splits_have_their_part", ["sources.code.part=1"], ["part is set but split is not"]),
    (
        "splits_have_their_part",
        ["sources.code.split=[9,1]", "sources.code.part=2"],
        ["part=2, but split [9, 1] has parts 0 to 1"],
    ),
    (
        "splits_have_their_part",
        ["sources.code.split=[1,0]", "sources.code.part=1"],
        ["part=1 of split [1, 0] has weight 0"],
    ),
    (
        "splits_of_a_corpus_agree",
        [
            "sources.code={path='c', split=[9,1], part=0}",
            "validation.code={path='c', split=[8,2], part=1}",
        ],
        ["sources.code and validation.code divide c by different splits, [9, 1] and [8, 2]"],
    ),
    (
        "ranks_divide_into_replicas",
        ["parallel={tp=2, pp=2, world_size=6}"],
        ["6 ranks are not divisible by pp x cp x tp = 2 x 1 x 2 = 4"],
    ),
    ("heads_divide_among_tp", ["model.num_key_value_heads=1", "parallel.tp=3"], ["num_attention_heads=4", "tp=3"]),
    (
        "heads_divide_among_tp",
        ["model.num_attention_heads=12", "model.num_key_value_heads=6", "parallel.tp=4"],
        ["num_key_value_heads=6 and tp=4: neither divides the other"],
    ),
    ("ffn_divides_among_tp", ["model.intermediate_size=127", "parallel.tp=2"], ["ffn intermediate_size=127", "tp=2"]),
    ("tokens_divide_among_cp_and_tp", ["parallel.cp=2"], ["seq_len=63 is not divisible by 2 x cp = 4"]),
    (
        "tokens_divide_among_cp_and_tp",
        ["parallel={tp=2, sequence_parallel=true}"],
        ["1 x 63 = 63 tokens", "cp x tp = 2", "sequence_parallel"],
    ),
    (
        "attention_can_be_merged_over_cp",
        ["parallel={cp=2}", "kernels={attention='sdpa'}"],
        ["cp=2 with cp_attention='auto'", "which sdpa does not", "or cp_attention = 'heads'"],
    ),
    (
        "heads_divide_among_cp",
        ["parallel={tp=2, cp=4, cp_attention='heads'}"],
        ["num_attention_heads=4 / tp=2 = 2 heads among cp=4", "use cp_attention = 'gather' or 'ring'"],
    ),
    (
        "heads_divide_among_cp",
        ["model.num_attention_heads=12", "model.num_key_value_heads=3", "parallel={cp=2, cp_attention='heads'}"],
        ["3 kv heads on each tp rank and cp=2: neither divides the other"],
    ),
    ("every_pp_rank_has_layers", ["parallel.pp=5"], ["pp=5 is above num_hidden_layers=4"]),
    (
        "every_pp_rank_has_layers",
        ["parallel={pp=2, virtual_stages=3}"],
        ["pp x virtual_stages = 2 x 3 = 6 is above num_hidden_layers=4", "virtual_stages of at most 2"],
    ),
    ("virtual_stages_belong_to_a_pipeline", ["parallel.virtual_stages=2"], ["virtual_stages=2 needs pp > 1"]),
    (
        "micro_batches_divide_among_interleaved_ranks",
        ["parallel={pp=2, virtual_stages=2}"],
        ["stages.1 (long): 3 micro-batches", "not divisible by pp=2", "a multiple of 1008"],
    ),
    ("experts_divide_among_ep", ["parallel.ep=2"], ["num_experts=0 cannot be divided among ep=2"]),
    (
        "experts_divide_among_ep",
        ["model.preset=qwen3-30b-a3b", "parallel={ep=3, world_size=4}"],
        ["num_experts=128 cannot be divided among ep=3"],
    ),
    (
        "experts_divide_among_ep",
        ["model.preset=qwen3-30b-a3b", "parallel={ep=8, world_size=4}"],
        ["4 ranks of a pipeline stage are not divisible by ep=8"],
    ),
    ("experts_divide_among_ep", ["model.preset=qwen3-30b-a3b", "parallel.tp=2"], ["needs sequence_parallel = true"]),
]


@pytest.mark.req("E07")
@pytest.mark.parametrize(("rule", "options", "said"), CASES)
def test_each_rule_says_which_numbers_do_not_fit(rule, options, said):
    text = "\n".join(problems(*options))
    assert all(part in text for part in said), text


def test_every_rule_has_a_case():
    rules = (*RECIPE_RULES, *DATA_RECIPE_RULES, *MODEL_RULES, *STAGE_RULES, *DATA_STAGE_RULES, *LAYOUT_RULES)
    assert {rule.__name__ for rule in rules} == {rule for rule, _, _ in CASES}


def test_a_right_recipe_breaks_no_rule():
    assert check(read()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["model.max_position_embeddings=63"],  # the base is raised, so positions beyond are meant
        [
            "model.max_position_embeddings=63",
            "stages.1.rope_theta=",
            "stages.1.rope_scaling={factor=4, original_max_position_embeddings=63}",
        ],
        ["model.num_key_value_heads=1", "parallel.tp=4"],  # fewer kv heads than ranks: copies
        ["stages.0.lr.shape=constant", "stages.0.lr.final=1e-3"],
        ["stages.0.lr.warmup_steps=10"],
        ["stages.0.blend.code=0"],
        ["stages.0.blend=", "stages.0.fractions={prose=1, code=0.5}"],
        ["stages.0.packing=best_fit", "stages.0.mask_documents=true"],
        ["sources.code.max_epochs=2", "sources.code.when_exhausted=stop"],
        ["sources.code={path='c', split=[99.5,0.5], part=0}", "validation.code={path='c', split=[99.5,0.5], part=1}"],
        ["init_from=checkpoints/a"],
        ["parallel.cp=2", "stages.0.seq_len=64", "stages.0.batch_tokens=768"],
        ["model.vocab_size=1999", "parallel.tp=4"],  # padded, never an error
    ],
)
def test_what_is_unusual_but_right_is_accepted(options):
    assert check(read(*options)) == []


def test_the_launched_ranks_count_not_the_intended_ones():
    recipe = read("parallel.world_size=3")
    assert check(recipe) == check(recipe, 1) == []
    found = check(recipe, 5)
    assert [line.split(":")[0] for line in found] == ["stages.0 (general)", "stages.1 (long)"]
    assert "12 rows per step" in found[0] and "micro_batch 1 x dp 5" in found[0]
    assert check(recipe, 5, stage=1) == found[1:]


def test_a_stage_is_checked_with_its_own_layout():
    (found,) = problems("stages.1.parallel.tp=3", "model.num_key_value_heads=1", "model.num_attention_heads=4")
    assert found.startswith("stages.1 (long): num_attention_heads=4 is not divisible by tp=3")
    recipe = read("stages.1.parallel.tp=2")
    assert check(for_stage(recipe, 1), 4, stage=1) == check(recipe, 4, stage=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model.preset=qwen3-30b-a3b"], "a mixture of experts"),
        (["model.preset=qwen3-235b-a22b", "parallel.ep=8"], "expert parallelism (ep > 1)"),
    ],
)
def test_what_is_not_built_can_be_loaded_and_planned_but_not_trained(options, said):
    recipe = read(*options)
    assert check(recipe, planned=True) == []
    assert said in "\n".join(check(recipe))
    assert "not trained yet" in check(recipe)[0]
