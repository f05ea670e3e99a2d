"""Rules that need more than one field: one function each, with numbers and what to change in every message.

Those of data are in data_rules.py, those of the layout in layout_rules.py. What depends on the machine (files, kernels)
is checked where it is opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Recipe
from megatron_lite.config.violation import Found, StageView, Violation

# --- the recipe as a whole ---


def stage_names_are_distinct(recipe: Recipe) -> Found:
    """A stage is started by its name or number."""
    for name, count in Counter(stage.name for stage in recipe.stages).items():
        keys = tuple(f"stages.{i}.name" for i, stage in enumerate(recipe.stages) if stage.name == name)
        if count > 1:
            yield Violation(keys, f"{count} stages are called '{name}'; give each its own name")
        if name.isdigit():
            yield Violation(keys, f"the stage name '{name}' could be mistaken for a stage's number; use a word")


def first_stage_starts_once(recipe: Recipe) -> Found:
    """init_from is where the first stage starts when that says 'previous'."""
    start = recipe.stages[0].start
    if recipe.init_from is not None and start != "previous":
        yield Violation(
            ("init_from", "stages.0.start"),
            f"init_from = '{recipe.init_from}' and stages.0.start = '{start}' both say where the first stage starts; "
            "remove one",
        )


def evaluation_has_sets(recipe: Recipe) -> Found:
    """Evaluating every so often needs something to evaluate on."""
    if recipe.evaluation.every and not recipe.validation:
        yield Violation(
            ("evaluation.every", "validation"),
            f"evaluation.every={recipe.evaluation.every} but there is no [validation.NAME]; add one or set it to 0",
        )


# --- the model ---


def query_heads_share_kv_heads_evenly(model: ModelConfig) -> Found:
    """Grouped-query attention: every kv head serves equally many query heads."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % kv_heads:
        yield Violation(
            ("model.num_attention_heads", "model.num_key_value_heads"),
            f"[model]: num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}; "
            "change one of them",
        )


def rotated_dims_are_even(model: ModelConfig) -> Found:
    """RoPE turns pairs of dims."""
    if model.rotary_dim % 2 or model.rotary_dim == 0:
        yield Violation(
            ("model.head_dim", "model.partial_rotary_factor"),
            f"[model]: head_dim={model.head_dim} x partial_rotary_factor={model.partial_rotary_factor} rotates "
            f"{model.rotary_dim} dims of a head; it must be an even number above 0",
        )


def model_type_has_its_parts(model: ModelConfig) -> Found:
    """A model of a type must be one that the Hugging Face architecture of that name can hold."""
    llama = {"norm": "rmsnorm", "qk_norm": False, "partial_rotary_factor": 1.0, "use_qkv_bias": False}
    qwen3 = llama | {"qk_norm": True, "mlp_bias": False}
    stablelm = {
        "norm": "layernorm",
        "qk_norm": False,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": model.hidden_size / model.num_attention_heads,
    }
    parts = {"stablelm": stablelm, "qwen3": qwen3, "qwen3_moe": qwen3, "llama": llama}
    for field, needed in parts[model.model_type].items():
        if getattr(model, field) != needed:
            yield Violation(
                ("model.model_type", f"model.{field}"),
                f"[model]: model_type='{model.model_type}' needs {field}={needed!r}, not {getattr(model, field)!r}",
            )
    if model.model_type == "llama" and model.hidden_size % model.num_attention_heads:
        yield Violation(
            ("model.model_type", "model.hidden_size", "model.num_attention_heads"),
            f"[model]: model_type='llama' needs a hidden_size, here {model.hidden_size}, that is divisible by "
            f"num_attention_heads={model.num_attention_heads}",
        )


def experts_are_complete(model: ModelConfig) -> Found:
    """Only qwen3_moe has experts, and then it needs their number, their width and how many a token sees."""
    keys = tuple(
        f"model.{key}" for key in ("model_type", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    experts, per_token, width = model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size
    if model.model_type != "qwen3_moe":
        if experts or per_token or width:
            yield Violation(
                keys,
                f"[model]: model_type='{model.model_type}' has no experts, but num_experts={experts}, "
                f"num_experts_per_tok={per_token}, moe_intermediate_size={width}; remove them or use 'qwen3_moe'",
            )
    elif not (experts > 0 and width > 0 and 1 <= per_token <= experts):
        yield Violation(
            keys,
            f"[model]: model_type='qwen3_moe' needs num_experts={experts} and moe_intermediate_size={width} above 0 "
            f"and num_experts_per_tok={per_token} from 1 to num_experts",
        )


# --- the length and the schedule of a stage ---


def stage_has_one_length(view: StageView) -> Found:
    """tokens or steps, not both."""
    stage = view.stage
    if (stage.tokens is None) == (stage.steps is None):
        given = (
            "neither is set" if stage.tokens is None else f"tokens={stage.tokens} and steps={stage.steps} are both set"
        )
        yield view.says(
            f"{view.where}: exactly one of tokens and steps sets its length, but {given}", "tokens", "steps"
        )


def batch_is_whole_rows(view: StageView) -> Found:
    """A step is a whole number of rows."""
    length = view.stage.seq_len
    for batch, key in _batches(view):
        if batch % length:
            lower = batch // length * length
            nearest = f"{lower} or {lower + length}" if lower else f"{length}"
            yield view.says(
                f"{view.where}: {key}={batch} is not divisible by seq_len={length}; use {nearest}", key, "seq_len"
            )


def ramp_rises(view: StageView) -> Found:
    """The tokens up to which each size of a ramp holds increase."""
    ends = [until for until, _ in view.stage.batch_ramp]
    if any(later <= sooner for sooner, later in zip(ends, ends[1:], strict=False)):
        yield view.says(f"{view.where}: the tokens of batch_ramp have to increase, but are {ends}", "batch_ramp")


def _batches(view: StageView) -> list[tuple[int, str]]:
    """Every size of a step, with the key that sets it."""
    return [(size, "batch_ramp") for _, size in view.stage.batch_ramp] + [(view.stage.batch_tokens, "batch_tokens")]


def rows_divide_among_ranks(view: StageView) -> Found:
    """Every data-parallel rank gets equally many whole micro-batches in every step."""
    stage, dp = view.stage, view.dp or 1
    unit = stage.micro_batch * dp
    for batch, key in _batches(view):
        if batch % stage.seq_len == 0 and batch // stage.seq_len % unit:
            unit_tokens = unit * stage.seq_len
            lower = batch // unit_tokens * unit_tokens
            nearest = f"{lower} or {lower + unit_tokens}" if lower else f"{unit_tokens}"
            yield view.says(
                f"{view.where}: {batch // stage.seq_len} rows per step ({key} {batch} / seq_len {stage.seq_len}) are "
                f"not divisible by micro_batch {stage.micro_batch} x dp {dp}; use {key}={nearest}",
                *(key, "seq_len", "micro_batch"),
                *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.world_size"),
            )


def warmup_is_given_once(view: StageView) -> Found:
    """warmup_steps or warmup_tokens."""
    lr = view.stage.lr
    if lr.warmup_steps is not None and lr.warmup_tokens is not None:
        yield view.says(
            f"{view.where}: lr.warmup_steps={lr.warmup_steps} and lr.warmup_tokens={lr.warmup_tokens} are both set; "
            "remove one",
            "lr.warmup_steps",
            "lr.warmup_tokens",
        )


def decay_belongs_to_wsd(view: StageView) -> Found:
    """wsd needs the length of its decay once; other shapes decay over all that follows the warm-up."""
    lr = view.stage.lr
    keys = ("lr.shape", "lr.decay_steps", "lr.decay_tokens")
    given = [f"lr.{key}={getattr(lr, key)}" for key in ("decay_steps", "decay_tokens") if getattr(lr, key) is not None]
    if lr.shape == "wsd" and len(given) != 1:
        found = " and ".join(given) if given else "neither"
        yield view.says(
            f"{view.where}: shape 'wsd' needs one of lr.decay_steps and lr.decay_tokens, has {found}", *keys
        )
    if lr.shape != "wsd" and given:
        yield view.says(
            f"{view.where}: {' and '.join(given)} has no meaning for shape '{lr.shape}'; remove it or use 'wsd'", *keys
        )


def schedule_fits_into_stage(view: StageView) -> Found:
    """Warm-up and decay are no longer than the stage."""
    stage = view.stage
    if stage.tokens is None and stage.steps is None:
        return
    lr, steps = stage.lr_in_steps, stage.num_steps
    warmup = lr.warmup_steps or 0
    decay = (lr.decay_steps or 0) if lr.shape == "wsd" else 0
    if warmup + decay > steps:
        parts = f"{warmup} steps of warm-up" + (f" and {decay} of decay" if decay else "")
        yield view.says(
            f"{view.where}: {parts} do not fit into {steps} steps; shorten them or lengthen the stage",
            *("tokens", "steps", "batch_tokens", "lr"),
        )


def rate_does_not_rise_to_its_end(view: StageView) -> Found:
    """final <= peak, and a constant rate has no other end."""
    lr = view.stage.lr
    keys = ("lr.final", "lr.peak", "lr.shape")
    if lr.final > lr.peak:
        yield view.says(f"{view.where}: lr.final={lr.final} is above lr.peak={lr.peak}; exchange or lower it", *keys)
    elif lr.shape == "constant" and lr.final not in (0.0, lr.peak):
        yield view.says(
            f"{view.where}: lr.final={lr.final} has no meaning for shape 'constant'; remove it or use another shape",
            *keys,
        )


def context_fits_the_positions(view: StageView) -> Found:
    """Rows are no longer than the positions the model knows, unless RoPE is stretched: a raised base, or YaRN."""
    model, length = view.model, view.stage.seq_len
    raised = model.rope_theta > view.recipe.model.rope_theta
    limit, keys = model.max_position_embeddings, ("seq_len", "rope_theta", "rope_scaling", "model")
    if model.rope_scaling is not None:
        limit = max(limit, int(model.rope_scaling.factor * model.rope_scaling.original_max_position_embeddings))
    if length > limit and not raised:
        yield view.says(
            f"{view.where}: seq_len={length} is above the {limit} positions of the model; shorten it, raise the "
            f"stage's rope_theta above {model.rope_theta:g}, set its rope_scaling, or raise the model's "
            "max_position_embeddings",
            *keys,
        )


RECIPE_RULES: tuple[Callable[[Recipe], Found], ...] = (
    stage_names_are_distinct,
    first_stage_starts_once,
    evaluation_has_sets,
)
MODEL_RULES: tuple[Callable[[ModelConfig], Found], ...] = (
    query_heads_share_kv_heads_evenly,
    rotated_dims_are_even,
    model_type_has_its_parts,
    experts_are_complete,
)
STAGE_RULES: tuple[Callable[[StageView], Found], ...] = (
    stage_has_one_length,
    batch_is_whole_rows,
    ramp_rises,
    rows_divide_among_ranks,
    warmup_is_given_once,
    decay_belongs_to_wsd,
    schedule_fits_into_stage,
    rate_does_not_rise_to_its_end,
    context_fits_the_positions,
)
