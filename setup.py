"""Packaging: the library lives in nxd_memopt/, the modeling files in models/ install as nxd_memopt.models."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="nxd_memopt",
    version="0.1.0",
    description="Tensor- and sequence-parallel layers with neuronx-distributed's API, and memory optimisations",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["nxd_memopt", "nxd_memopt.*"]), "nxd_memopt.models"],
    package_dir={"nxd_memopt.models": "models"},
    package_data={"nxd_memopt": ["py.typed"]},
    install_requires=["torch>=2.9", "transformers>=5.0", "safetensors>=0.5", "numpy", "packaging", "tyro", "rich"],
    extras_require={
        "train": ["datasets", "pyyaml", "tensorboard", "matplotlib"],
        "flash4": ["flash-attn-4==4.0.0b36"],
        "flash4-cu13": ["flash-attn-4[cu13]==4.0.0b36"],
        "gguf": ["gguf", "accelerate"],
        "dev": ["pytest", "pytest-timeout", "pytest-xdist", "ruff", "basedpyright", "import-linter"],
    },
    entry_points={"console_scripts": ["nxd-memopt = nxd_memopt.cli:main"]},
)
