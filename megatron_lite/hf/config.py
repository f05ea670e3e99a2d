"""config.json of a Hugging Face folder <-> ModelConfig.

Every field of a file is mapped, or has to have the one value that our model computes with, or is known to say nothing
about the model. Anything else is refused by name. An absent field means what transformers takes it to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.rules import MODEL_RULES
from megatron_lite.errors import ConfigError, require

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # ours -> as config.json says it

_REQUIRED = object()
_WIDTHS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
# About generation, storage or labels: nothing that a forward or a gradient depends on.
_HARMLESS = frozenset((
    *TOKEN_IDS, "unk_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "name_or_path",
    "_commit_hash", "use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "return_dict",
    "return_dict_in_generate", "id2label", "label2id", "num_labels", "problem_type", "tokenizer_class",
    "is_llama_config", "transformers.js_config", "_attn_implementation_autoset", "attn_implementation",
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams",
    "max_length", "min_length", "max_new_tokens", "early_stopping",
))  # fmt: skip
# What may only have the value that our model computes with.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "use_parallel_residual": (False,),
    "qk_layernorm": (False,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
}


@dataclass(frozen=True)
class Family:
    """What one Hugging Face architecture settles, and the fields it has beyond those of all."""

    architecture: str
    norms: str  # in words, for messages
    eps: tuple[str, float]  # name and default of the norm's epsilon
    settled: dict[str, Any]  # fields of ModelConfig
    optional: dict[str, Any] = field(default_factory=dict)  # both name them alike -> default
    kv_heads: Any = _REQUIRED
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    partial_rotary_factor: float = 1.0
    written: dict[str, Any] = field(default_factory=dict)  # constants of a config.json


FAMILIES = {
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        norms="the norms are LayerNorm, weight and bias",
        eps=("layer_norm_eps", 1e-5),
        settled={"norm": "layernorm"},
        optional={"use_qkv_bias": False},
        partial_rotary_factor=0.25,
        written={"hidden_dropout": 0.0, "qk_layernorm": False, "use_parallel_residual": False},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        norms="the norms are RMSNorm, with a norm of q and of k",
        eps=("rms_norm_eps", 1e-6),
        settled={"norm": "rmsnorm", "qk_norm": True},
        optional={"attention_bias": False},
        head_dim=128,
        written={"sliding_window": None, "use_sliding_window": False},
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        norms="the norms are RMSNorm, without one of q and k",
        eps=("rms_norm_eps", 1e-6),
        settled={"norm": "rmsnorm"},
        optional={"attention_bias": False, "mlp_bias": False},
        kv_heads=None,
        written={"pretraining_tp": 1},
    ),
}


def from_hf(raw: dict[str, Any], where: str, family: str | None = None) -> ModelConfig:
    """The model that a config.json describes; `where` names the file, `family` what it is expected to be.

    ConfigError: another family, or fields that are missing, not understood, or ask for what our models do not compute;
    all of them are named.
    """
    kind = raw.get("model_type")
    require(kind in FAMILIES, f"{where}: model_type = {kind!r} is not one of {', '.join(FAMILIES)}")
    assert isinstance(kind, str)
    if family is not None and family != kind:
        raise ConfigError(
            f"{where} describes a {kind} model ({FAMILIES[kind].norms}), not {family} ({FAMILIES[family].norms})"
        )
    reader = _Reader(raw, FAMILIES[kind])
    fields = {"model_type": kind} | reader.fields()
    problems = reader.problems + reader.not_understood()
    if not problems:
        try:
            model = ModelConfig.model_validate(fields)
        except ValidationError as error:
            problems += [
                f"{'.'.join(map(str, detail['loc']))} = {detail['input']!r}: {detail['msg']}"
                for detail in error.errors(include_url=False)
            ]
        else:
            problems += [found.message.removeprefix("[model]: ") for rule in MODEL_RULES for found in rule(model)]
    require(not problems, f"{where} cannot be imported: " + "; ".join(problems))
    return model


class _Reader:
    """Takes fields out of a config.json, and remembers which were understood and what is wrong with them."""

    def __init__(self, raw: dict[str, Any], family: Family):
        self._raw, self._family = raw, family
        self._seen: set[str] = set()
        self.problems: list[str] = []

    def fields(self) -> dict[str, Any]:
        """Fields of ModelConfig, apart from model_type."""
        family = self._family
        found = {name: self._take(name, _REQUIRED) for name in _WIDTHS}
        heads, hidden = found["num_attention_heads"], found["hidden_size"]
        kv_heads = self._take("num_key_value_heads", family.kv_heads)
        found["num_key_value_heads"] = heads if kv_heads is None else kv_heads
        head_dim = self._take("head_dim", family.head_dim)
        if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            head_dim = hidden // heads
        found["head_dim"] = head_dim
        found["norm_eps"] = self._take(*family.eps)
        for name, default in {"tie_word_embeddings": False, "initializer_range": 0.02, **family.optional}.items():
            found[name] = self._take(name, default)
        return found | family.settled | self._rope(found["max_position_embeddings"])

    def not_understood(self) -> list[str]:
        """One line for every field that is neither mapped nor known to be without meaning here."""
        layers = self._raw.get("num_hidden_layers")
        lines = []
        for name, value in self._raw.items():
            if name in self._seen or name in _HARMLESS or value is None:  # null leaves a field unset
                continue
            if name in ("sliding_window", "max_window_layers") and self._family is FAMILIES["qwen3"]:
                continue  # of no effect, for use_sliding_window has to be false
            if name == "architectures":
                allowed: tuple[Any, ...] = ([self._family.architecture],)
            elif name == "layer_types":
                allowed = (["full_attention"] * layers,) if isinstance(layers, int) else ()
            elif name in ("attention_bias", "mlp_bias", "use_qkv_bias"):  # where the architecture has no such choice
                allowed = (False,)
            else:
                allowed = _ONLY.get(name, ())
            if value not in allowed:
                shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
                only = f"; only {' or '.join(map(repr, allowed))} is" if allowed and len(repr(allowed)) <= 80 else ""
                lines.append(f"{name} = {shown} is not supported{only}")
        return lines

    def _take(self, name: str, default: Any) -> Any:
        self._seen.add(name)
        value = self._raw.get(name)
        if value is None:
            if default is _REQUIRED:
                self.problems.append(f"{name} is missing")
                return None
            return default
        return value

    def _rope(self, positions: Any) -> dict[str, Any]:
        """Base, scaling and share of rotating dims, from either form: rope_theta with rope_scaling (transformers 4),
        or rope_parameters (transformers 5)."""
        self._seen |= {"rope_parameters", "rope_scaling"}
        both = [name for name in ("rope_parameters", "rope_scaling") if self._raw.get(name)]
        if len(both) == 2:
            self.problems.append("rope_parameters and rope_scaling are both set; remove one")
            return {}
        table = self._raw.get(both[0]) if both else {}
        if not isinstance(table, dict):
            self.problems.append(f"{both[0]} = {table!r} is not a table")
            return {}
        where = both[0] if both else "rope_parameters"
        table = {key: value for key, value in table.items() if value is not None}
        found = {
            "rope_theta": self._either(table, where, "rope_theta", 10_000.0),
            "partial_rotary_factor": self._either(
                table, where, "partial_rotary_factor", self._family.partial_rotary_factor
            ),
        }
        kinds = [table.pop(key) for key in ("rope_type", "type") if key in table]
        if len(set(map(repr, kinds))) > 1:
            self.problems.append(f"{where}: rope_type = {kinds[0]!r} and type = {kinds[1]!r} contradict each other")
        kind = kinds[0] if kinds else "default"
        if kind == "yarn":
            found["rope_scaling"] = self._yarn(table, where, positions)
        elif kind != "default":
            self.problems.append(f"{where}: rope_type = {kind!r} is not one of 'default', 'yarn'")
            return found
        self.problems += [f"{where}: {key} = {value!r} is not supported" for key, value in table.items()]
        return found

    def _yarn(self, table: dict[str, Any], where: str, positions: Any) -> dict[str, Any] | None:
        """Takes YaRN's keys out of `table`. A factor that is not given is the ratio of the two lengths."""
        original = self._either(table, where, "original_max_position_embeddings", positions)
        keys = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        values = {key: table.pop(key, None) for key in keys}
        wrong = [
            f"{where}: {key} = {value!r} is not a number"
            for key, value in {**values, "original_max_position_embeddings": original}.items()
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float))
        ]
        if table.get("truncate") is True:
            del table["truncate"]
        if wrong or not original or not isinstance(positions, int):
            self.problems += wrong or [f"{where}: original_max_position_embeddings = {original!r} is no length"]
            return None
        factor = positions / original if values["factor"] is None else float(values["factor"])
        scale = values["attention_factor"]
        if scale is None and values["mscale"] and values["mscale_all_dim"] and factor > 0:
            scale = _mscale(factor, values["mscale"]) / _mscale(factor, values["mscale_all_dim"])
        return {
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": float(values["beta_fast"] or 32),
            "beta_slow": float(values["beta_slow"] or 1),
            "attention_factor": None if scale is None else float(scale),
        }

    def _either(self, table: dict[str, Any], where: str, name: str, default: Any) -> Any:
        """A value that stands in the RoPE table or beside it."""
        inside, outside = table.pop(name, None), self._take(name, None)
        if inside is not None and outside is not None and inside != outside:
            self.problems.append(f"{name} = {outside!r} and {where}.{name} = {inside!r} contradict each other")
        found = outside if inside is None else inside
        return default if found is None else found


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def to_hf(model: ModelConfig, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model, in the form that released checkpoints have and transformers 4 and 5 read.

    dtype: of the weights, "fp32", "bf16" or "fp16". ConfigError: no architecture of transformers computes this model.
    """
    require(model.model_type in FAMILIES, f"a {model.model_type} model cannot be exported; {', '.join(FAMILIES)} can")
    wrong = [found.message for rule in MODEL_RULES for found in rule(model)]
    require(not wrong, "no Hugging Face architecture holds this model: " + "; ".join(wrong))
    family = FAMILIES[model.model_type]
    config = {name: getattr(model, name) for name in _WIDTHS}
    config |= {
        "architectures": [family.architecture],
        "model_type": model.model_type,
        "torch_dtype": DTYPE_NAMES[dtype],
        "num_key_value_heads": model.num_key_value_heads,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings,
        "use_cache": True,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        family.eps[0]: model.norm_eps,
    }
    config |= {name: getattr(model, name) for name in family.optional}
    config |= family.written | {name: token_ids.get(name) for name in TOKEN_IDS}
    if model.model_type == "stablelm":
        config["partial_rotary_factor"] = model.partial_rotary_factor
    else:
        config["head_dim"] = model.head_dim
    if model.model_type == "qwen3":
        config["max_window_layers"] = model.num_hidden_layers
    return dict(sorted(config.items()))


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rope_scaling is None:
        return None
    return {"rope_type": model.rope_scaling.rope_type} | model.rope_scaling.model_dump(exclude_defaults=True)
