"""Package metadata. Exact tested versions are in requirements/; the ranges here say what should work."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="megatron_lite",
    version="0.1.0",
    description="Pretraining of language models in stages: small, readable, distributed, exact",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    install_requires=[
        "torch>=2.10",
        "numpy>=1.26",
        "pydantic>=2.7",
        "safetensors>=0.5",
        "orjson>=3.10",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "tqdm>=4.60",
        "xxhash>=3.4",
        "zstandard>=0.22",
    ],
    extras_require={
        "fast": ["gigatoken>=0.10"],
        "parquet": ["pyarrow>=15"],
        "plot": ["matplotlib>=3.8"],
        "tensorboard": ["tensorboard>=2.16"],
        "wandb": ["wandb>=0.17"],
        "flash-attn": ["flash-attn>=2.6"],
        "dev": [
            "gigatoken>=0.10",
            "pyarrow>=15",
            "matplotlib>=3.8",
            "transformers>=5.0",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "mypy>=1.11",
        ],
    },
)
