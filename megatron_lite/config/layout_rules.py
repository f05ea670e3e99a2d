"""Rules of how a stage is divided among ranks: one function each, with numbers and what to change in every message."""

from __future__ import annotations

from collections.abc import Callable

from megatron_lite.config.violation import Found, StageView, ranks_of_one_replica

WITHOUT_PARTS = ("sdpa",)  # attention kernels that do not tell their log-sum-exp


def ranks_divide_into_replicas(view: StageView) -> Found:
    """dp is what remains of the ranks, and must be whole."""
    p, group = view.parallel, ranks_of_one_replica(view.parallel)
    if view.ranks and view.ranks % group:
        yield view.says(
            f"{view.layout_where}: {view.ranks} ranks are not divisible by pp x cp x tp = {p.pp} x {p.cp} x {p.tp} = "
            f"{group}; change the layout or use a multiple of {group} ranks",
            *("parallel.pp", "parallel.cp", "parallel.tp", "parallel.world_size"),
        )


def heads_divide_among_tp(view: StageView) -> Found:
    """Query heads are cut evenly; kv heads are cut evenly, or copied evenly when there are fewer than tp."""
    tp, heads, kv_heads = view.parallel.tp, view.model.num_attention_heads, view.model.num_key_value_heads
    if heads % tp:
        yield view.says(
            f"{view.layout_where}: num_attention_heads={heads} is not divisible by tp={tp}; use a tp that divides it",
            *("parallel.tp", "model.num_attention_heads"),
        )
    if kv_heads % tp and tp % kv_heads:
        yield view.says(
            f"{view.layout_where}: num_key_value_heads={kv_heads} and tp={tp}: neither divides the other; "
            "use a tp that is a divisor or a multiple",
            *("parallel.tp", "model.num_key_value_heads"),
        )


def ffn_divides_among_tp(view: StageView) -> Found:
    """The columns of gate and up are cut evenly, each by itself. Experts are never cut."""
    tp, ffn = view.parallel.tp, view.model.intermediate_size
    if ffn % tp and not view.model.num_experts:
        yield view.says(
            f"{view.layout_where}: ffn intermediate_size={ffn} is not divisible by tp={tp}; use a tp that divides it",
            *("parallel.tp", "model.intermediate_size"),
        )


def tokens_divide_among_cp_and_tp(view: StageView) -> Found:
    """Context parallelism cuts rows into 2 cp equal parts; sequence parallelism cuts a micro-batch among tp ranks."""
    stage, p = view.stage, view.parallel
    if p.cp > 1 and stage.seq_len % (2 * p.cp):
        yield view.says(
            f"{view.where}: seq_len={stage.seq_len} is not divisible by 2 x cp = {2 * p.cp}; "
            "change seq_len or parallel.cp",
            *("seq_len", "parallel.cp"),
        )
    tokens = stage.micro_batch * stage.seq_len
    if p.sequence_parallel and tokens % (p.cp * p.tp):
        yield view.says(
            f"{view.where}: a micro-batch of {stage.micro_batch} x {stage.seq_len} = {tokens} tokens is not divisible "
            f"by cp x tp = {p.cp * p.tp}, which sequence_parallel needs; change micro_batch, seq_len or tp",
            *("seq_len", "micro_batch", "parallel.cp", "parallel.tp", "parallel.sequence_parallel"),
        )


def heads_divide_among_cp(view: StageView) -> Found:
    """cp_attention = 'heads' spreads the heads of a tp rank over the cp ranks; kv heads fewer than those are copied."""
    p, model = view.parallel, view.model
    if p.cp == 1 or p.cp_attention != "heads":
        return
    heads, kv_heads = model.num_attention_heads // p.tp, max(1, model.num_key_value_heads // p.tp)
    other = "change cp, or use cp_attention = 'gather' or 'ring'"
    if heads % p.cp:
        yield view.says(
            f"{view.layout_where}: cp_attention='heads' divides num_attention_heads={model.num_attention_heads} / "
            f"tp={p.tp} = {heads} heads among cp={p.cp} ranks, which is not whole; {other}",
            *("parallel.cp", "parallel.tp", "parallel.cp_attention", "model.num_attention_heads"),
        )
    if kv_heads % p.cp and p.cp % kv_heads:
        yield view.says(
            f"{view.layout_where}: cp_attention='heads' with {kv_heads} kv heads on each tp rank and cp={p.cp}: "
            f"neither divides the other; {other}",
            *("parallel.cp", "parallel.tp", "parallel.cp_attention", "model.num_key_value_heads"),
        )


def attention_can_be_merged_over_cp(view: StageView) -> Found:
    """Gathering and ring merge what a query finds in blocks of keys; for that a kernel has to tell its sums."""
    p, kernels = view.parallel, {**view.recipe.kernels.model_dump(), **view.stage.kernels}
    if p.cp > 1 and p.cp_attention != "heads" and kernels["attention"] in WITHOUT_PARTS:
        yield view.says(
            f"{view.layout_where}: cp={p.cp} with cp_attention='{p.cp_attention}' needs an attention kernel that tells "
            f"its log-sum-exp, which {kernels['attention']} does not; use another kernel or cp_attention = 'heads'",
            *("parallel.cp", "parallel.cp_attention", "kernels.attention"),
        )


def every_pp_rank_has_layers(view: StageView) -> Found:
    """A pipeline rank without a block, or a chunk without one, would wait forever."""
    pp, virtual, layers = view.parallel.pp, view.parallel.virtual_stages, view.model.num_hidden_layers
    if pp > layers:
        yield view.says(
            f"{view.layout_where}: pp={pp} is above num_hidden_layers={layers}; use a pp of at most {layers}",
            *("parallel.pp", "model.num_hidden_layers"),
        )
    elif pp * virtual > layers and pp > 1:
        yield view.says(
            f"{view.layout_where}: pp x virtual_stages = {pp} x {virtual} = {pp * virtual} is above "
            f"num_hidden_layers={layers}; use virtual_stages of at most {layers // pp}",
            *("parallel.pp", "parallel.virtual_stages", "model.num_hidden_layers"),
        )


def virtual_stages_belong_to_a_pipeline(view: StageView) -> Found:
    """Several chunks on a rank shorten the bubble of a pipeline; micro-batches go through them pp at a time."""
    p = view.parallel
    if p.virtual_stages > 1 and p.pp == 1:
        yield view.says(
            f"{view.layout_where}: virtual_stages={p.virtual_stages} needs pp > 1; raise pp or remove it",
            *("parallel.pp", "parallel.virtual_stages"),
        )


def micro_batches_divide_among_interleaved_ranks(view: StageView) -> Found:
    """The interleaved schedule runs whole groups of pp micro-batches."""
    p, stage = view.parallel, view.stage
    if p.pp == 1 or p.virtual_stages == 1:
        return
    unit = stage.seq_len * stage.micro_batch * (view.dp or 1)  # tokens of one micro-batch on every data-parallel rank
    for batch in stage.batch_sizes:
        if batch % unit == 0 and batch // unit % p.pp:
            yield view.says(
                f"{view.where}: {batch // unit} micro-batches on each data-parallel rank are not divisible by "
                f"pp={p.pp}, which virtual_stages={p.virtual_stages} needs; use batch_tokens that are a multiple of "
                f"{unit * p.pp}, a smaller micro_batch, or virtual_stages = 1",
                *("batch_tokens", "batch_ramp", "seq_len", "micro_batch", "parallel"),
            )


def experts_divide_among_ep(view: StageView) -> Found:
    """Experts are spread evenly over ep ranks, which divide the ranks of one pipeline stage."""
    p, experts, keys = view.parallel, view.model.num_experts, ("parallel", "model.num_experts")
    if p.ep > 1 and (experts == 0 or experts % p.ep):
        yield view.says(f"{view.layout_where}: num_experts={experts} cannot be divided among ep={p.ep} ranks", *keys)
    if view.ranks and view.ranks % p.pp == 0 and view.ranks // p.pp % p.ep:
        yield view.says(
            f"{view.layout_where}: {view.ranks // p.pp} ranks of a pipeline stage are not divisible by ep={p.ep}; "
            "use an ep that divides them",
            *keys,
        )
    if experts and p.tp > 1 and not p.sequence_parallel:
        yield view.says(
            f"{view.layout_where}: a mixture of experts at tp={p.tp} needs sequence_parallel = true, "
            "so that every rank routes tokens of its own",
            *keys,
        )


LAYOUT_RULES: tuple[Callable[[StageView], Found], ...] = (
    ranks_divide_into_replicas,
    heads_divide_among_tp,
    ffn_divides_among_tp,
    tokens_divide_among_cp_and_tp,
    heads_divide_among_cp,
    attention_can_be_merged_over_cp,
    every_pp_rank_has_layers,
    virtual_stages_belong_to_a_pipeline,
    micro_batches_divide_among_interleaved_ranks,
    experts_divide_among_ep,
)
