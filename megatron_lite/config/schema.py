"""What a recipe may say, section by section. Rules across fields live in check.py, reading and merging in load.py."""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from megatron_lite.config.model import ModelConfig, RopeScaling
from megatron_lite.config.section import Section

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]  # no dots: --set divides keys at them
Weight = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Tokenizer(Section):
    """What turned text into ids; training needs it only for samples and for the end-of-document id."""

    path: str = "byte"  # "byte", a sentencepiece .model, a tokenizer.json or a folder that holds one


class Parallel(Section):
    """How ranks are divided; dp is what remains of the launched ranks."""

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    sequence_parallel: bool = False  # norms and residuals on T/tp tokens (needs tp > 1 to matter)
    recompute: Literal["none", "selective", "full"] = "none"
    virtual_stages: int = Field(default=1, ge=1)  # parts of the model on each pp rank (interleaved 1F1B)
    cp_attention: Literal["auto", "gather", "ring", "heads"] = "auto"  # how cp ranks share keys and values
    # What runs beside the computation. Off only to measure what that is worth: the numbers are the same to the bit.
    overlap_gradients: bool = True  # reduce-scatter during the last backward
    overlap_weights: bool = True  # all-gather during the next forward
    overlap_pipeline: bool = True  # messages between pp ranks
    world_size: int | None = Field(default=None, ge=1)  # what the recipe is meant for


class Kernels(Section):
    """One line per op; "auto" takes the first backend that is available here."""

    attention: str = "auto"
    norm: str = "auto"
    rope: str = "auto"
    swiglu: str = "auto"
    cross_entropy: str = "auto"
    adamw: str = "auto"


class Optimizer(Section):
    """AdamW; one-dimensional parameters are never decayed."""

    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)  # largest global gradient norm; 0 = never clip
    zero: Literal[0, 1] = 1  # 1 = every data-parallel rank keeps and updates its share of the optimizer state


class Checkpoint(Section):
    """When to save and what to keep."""

    every: int = Field(default=1000, ge=0)  # steps; 0 = only the last step of a stage
    keep: int = Field(default=3, ge=1)  # newest complete checkpoints kept
    on_missing_optimizer: Literal["error", "reset"] = "error"


class Evaluation(Section):
    """Loss on the same rows of every [validation.NAME], each time."""

    every: int = Field(default=0, ge=0)  # steps; 0 = only at the start and the end of a stage
    rows: int = Field(default=64, ge=1)  # rows of seq_len tokens per validation set, at most


class Data(Section):
    """How corpora are read."""

    cache: str | None = None  # folder of index files; default: "cache" in the run folder
    mmap: bool = True  # false: plain reads, for file systems that limit memory maps


class Runtime(Section):
    """Process groups and time limits."""

    timeout_s: float = Field(default=600.0, gt=0)  # of every collective
    stop_after_s: float | None = Field(default=None, gt=0)  # save and stop cleanly after this long


class Guard(Section):
    """What to do when training misbehaves."""

    max_skips: int = Field(default=10, ge=0)  # consecutive non-finite steps before the run stops
    check_replicas_every: int = Field(default=0, ge=0)  # steps; 0 = only when saving


class Logging(Section):
    """What is printed and written."""

    every: int = Field(default=10, ge=1)  # steps between printed lines; metrics.jsonl has every step
    samples: bool = False  # write the ids of the rows each step consumed to samples.jsonl
    tensorboard: bool = False
    wandb: bool = False  # offline unless WANDB_MODE says otherwise
    peak_tflops: float | None = Field(default=None, gt=0)  # of one device in bf16, for MFU; default: looked up


class Source(Section):
    """One corpus of a blend."""

    path: str = Field(min_length=1)  # prefix of a .bin/.idx pair
    # weights of contiguous parts, by documents
    split: tuple[Weight, ...] | None = Field(default=None, strict=False, min_length=1)
    part: int | None = Field(default=None, ge=0)  # which of them this section reads, from 0
    max_epochs: float | None = Field(default=None, gt=0)  # default: read again as often as a stage needs
    when_exhausted: Literal["error", "stop"] = "error"  # a stage that needs more: refused, or ends before that step
    min_length: int = Field(default=0, ge=0)  # documents shorter than this are left out (tokens)
    max_length: int | None = Field(default=None, ge=1)  # longer ones are left out


class Schedule(Section):
    """Learning rate of update i = 1 … N of one stage."""

    peak: float = Field(gt=0)  # at the end of warm-up
    final: float = Field(default=0.0, ge=0)  # at the last update
    warmup_steps: int | None = Field(default=None, ge=0)  # at most one of the two
    warmup_tokens: int | None = Field(default=None, ge=0)
    decay_steps: int | None = Field(default=None, ge=0)  # wsd: length of the final decay; exactly one of the two
    decay_tokens: int | None = Field(default=None, ge=0)
    shape: Literal["cosine", "linear", "wsd", "constant"] = "cosine"


Ramp = Annotated[tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]], Field(strict=False)]


class Stage(Section):
    """One training stage: data, lengths, schedule."""

    name: Name
    tokens: int | None = Field(default=None, gt=0)  # exactly one of tokens and steps
    steps: int | None = Field(default=None, gt=0)
    seq_len: int = Field(gt=0)
    batch_tokens: int = Field(gt=0)  # of one optimizer step, over all ranks
    batch_ramp: tuple[Ramp, ...] = Field(default=(), strict=False)  # smaller steps at first: [until these tokens, size]
    micro_batch: int = Field(gt=0)  # rows of one forward on one rank
    rope_theta: float | None = Field(default=None, gt=0)  # default: the model's
    rope_scaling: RopeScaling | None = None
    packing: Literal["concat", "best_fit"] = "concat"  # cut documents at row ends, or keep them whole where they fit
    mask_documents: bool = False  # attention and positions stay inside a document
    blend: dict[str, float] | None = None  # source -> share of the tokens, normalised; exactly one of the two
    fractions: dict[str, float] | None = None  # source -> how much of it, 1.0 = all its rows, once per round
    start: str = "previous"  # previous | random | a checkpoint folder
    moments: Literal["keep", "reset"] = "keep"  # of the optimizer, when starting from a checkpoint
    lr: Schedule
    parallel: dict[str, Any] = {}  # overrides of [parallel] for this stage
    kernels: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}

    @property
    def mixture(self) -> dict[str, float]:
        """`blend` or `fractions`: which sources, and how much of each."""
        return self.blend or self.fractions or {}

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the stage: `steps`, or enough to see at least `tokens`."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return self.steps_for(self.tokens)

    @property
    def rows_per_step(self) -> int:
        """Rows of seq_len tokens in one optimizer step, after the ramp."""
        return self.batch_tokens // self.seq_len

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Tokens of a step, in the order of use."""
        return (*(size for _, size in self.batch_ramp), self.batch_tokens)

    def batch_at(self, step: int) -> int:
        """Tokens of step 1, 2, …"""
        return self.tokens_after(step) - self.tokens_after(step - 1)

    def tokens_after(self, step: int) -> int:
        """Tokens of the first `step` steps. Those of the ramp have its size until its tokens have been seen."""
        seen = 0
        for until, size in self.batch_ramp:
            steps = min(step, max(0, -(-(until - seen) // size)))
            seen, step = seen + steps * size, step - steps
        return seen + step * self.batch_tokens

    def rows_after(self, step: int) -> int:
        """Rows of the first `step` steps."""
        return self.tokens_after(step) // self.seq_len

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that see at least so many tokens."""
        return bisect_left(range(-(-tokens // min(self.batch_sizes))), tokens, key=self.tokens_after)

    @property
    def lr_in_steps(self) -> Schedule:
        """The schedule, with the lengths that were given in tokens as steps."""
        lr = self.lr
        changes: dict[str, int | None] = {}
        if lr.warmup_tokens is not None:
            changes |= {"warmup_steps": self.steps_for(lr.warmup_tokens), "warmup_tokens": None}
        if lr.decay_tokens is not None:
            changes |= {"decay_steps": -(-lr.decay_tokens // self.batch_tokens), "decay_tokens": None}
        return lr.model_copy(update=changes)


class Recipe(Section):
    """Everything a run is."""

    run: str = Field(min_length=1)  # folder of all output
    seed: int = 1234
    precision: Literal["bf16", "fp32"] = "bf16"
    init_from: str | None = None  # checkpoint folder instead of random weights for the first stage
    model: ModelConfig
    tokenizer: Tokenizer = Tokenizer()
    parallel: Parallel = Parallel()
    kernels: Kernels = Kernels()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    data: Data = Data()
    runtime: Runtime = Runtime()
    guard: Guard = Guard()
    logging: Logging = Logging()
    sources: dict[Name, Source]
    validation: dict[Name, Source] = {}
    stages: tuple[Stage, ...] = Field(strict=False, min_length=1)
