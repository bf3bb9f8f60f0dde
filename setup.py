"""Packaging: the library lives in nxd_memopt/, nxd_memopt/models is a link to the modeling files in models/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The library itself needs no transformers: it installs next to neuronx-distributed's examples, which pin 4.26 and 4.48.
# safetensors writes by way of numpy and does not require it.
CORE = ["torch>=2.9", "safetensors>=0.5", "numpy", "packaging"]
MODELS = ["transformers>=5.0"]  # as nxd_memopt/_optional.py checks
CLI = ["rich"]
GGUF = [*MODELS, "gguf", "accelerate"]
TRAIN = [*MODELS, *CLI, "datasets", "filelock>=3.30", "pyyaml", "tensorboard", "matplotlib"]
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "ruff", "basedpyright", "import-linter"]

# Read, not imported: building must not need the package's requirements.
INIT = Path(__file__).with_name("nxd_memopt") / "__init__.py"
VERSION = re.findall(r'^__version__ = "(.+)"$', INIT.read_text(encoding="utf-8"), re.MULTILINE)[0]

setup(
    name="nxd_memopt",
    version=VERSION,
    description="Tensor- and sequence-parallel layers with neuronx-distributed's API, and memory optimisations",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["nxd_memopt", "nxd_memopt.*"]),
    package_data={
        "nxd_memopt": ["py.typed"],
        "nxd_memopt.planner": ["devices.toml"],
        "nxd_memopt.selftest": ["golden.json"],
        "nxd_memopt.training": ["recipes/*.yaml"],
    },
    install_requires=CORE,
    extras_require={
        "models": MODELS,
        "cli": CLI,
        "train": TRAIN,
        "gguf": GGUF,
        "wandb": ["wandb"],
        "flash4": ["flash-attn-4==4.0.0b36"],
        "flash4-cu13": ["flash-attn-4[cu13]==4.0.0b36"],
        "dev": [*TRAIN, *GGUF, *TOOLS],
    },
    entry_points={"console_scripts": ["nxd-memopt = nxd_memopt.cli:main"]},
)
