"""megatron_lite: pretraining of StableLM and Qwen3 models in parallel layouts that are exact and can be read."""

__version__ = "0.1.0"
