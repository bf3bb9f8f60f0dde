"""Checks the names of files and of the Hugging Face Hub in a configuration, before torch is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nxd_memopt.options import collected, listed
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.sources.local_data import is_repository, is_saved, local_files
from nxd_memopt.training.runtime.distributed import datasets_cache, hub_endpoint, is_rank_zero, use_hub_cache

HUB_TIMEOUT_S = 5.0
# Data that is neither files of documents nor on the hub: the standard library, and indexed tokens.
OTHER_DATA = ("stdlib",)
INDEXED = ".idx"


def require_inputs(config: TrainConfig, *, is_one_host: bool = True) -> None:
    """Raise ``ValueError`` for data without a name, files that do not exist, and names of a hub that does not answer.

    Imports neither torch nor transformers, so that a wrong name is an error within a second. Files that
    the run reads are checked by what reads them.

    Args:
        config: options of the run.
        is_one_host: whether all ranks see the same files. Otherwise the names of what rank 0 alone reads are not
            checked.

    Raises:
        ValueError: a directory or file does not exist; all of them are in the message.
    """
    config.data.require_sources()
    problems: list[str] = []
    with collected(problems):
        _require_pretrained(config.model.pretrained)
    tokenizer = config.model.tokenizer
    if tokenizer is not None and Path(tokenizer).exists():
        tokenizer = None
    with collected(problems):
        _require_hub_name(tokenizer)
    datasets: list[str] = []
    if is_one_host:
        checkpoints = {"trainer.resume_from": config.trainer.resume_from, "model.warm_start": config.model.warm_start}
        for option, name in checkpoints.items():
            if name is not None and not Path(name).exists():
                problems.append(f"{option} {name} does not exist: name a run's trainer.output_dir")
        for name in (*config.data.sources, config.data.validation_dataset):
            with collected(problems):
                if name is not None and _is_on_hub(name):
                    datasets.append(name)
    if problems:
        raise ValueError(listed(problems))
    if datasets or tokenizer is not None:
        _require_hub(tokenizer, datasets)


def _require_hub(tokenizer: str | None, datasets: list[str]) -> None:
    """Ask the hub once whether it answers; if not, its libraries read their caches alone.

    Raises:
        ValueError: the hub does not answer, and no cache has one of the names.
    """
    endpoint = hub_endpoint()
    if endpoint is not None and _answers(endpoint):
        return
    use_hub_cache()
    from huggingface_hub import constants  # reads the variable

    problems: list[str] = []
    why = f"{endpoint} does not answer"
    if endpoint is None:
        why = "HF_HUB_OFFLINE turns the Hugging Face Hub off"
    remedy = f"name local files, which are looked for in {Path.cwd()}, or try again with a network"
    cache = Path(constants.HF_HUB_CACHE)
    if tokenizer is not None and not (cache / f"models--{tokenizer.replace('/', '--')}").is_dir():
        problems.append(f"model.tokenizer {tokenizer} is no directory, and {why}: {remedy}")
    # The datasets library has a cache of prepared data too: directories with the organization's name.
    prepared = datasets_cache(constants.HF_HOME)
    for name in datasets:
        organization = f"{name.rpartition('/')[0]}___" if "/" in name else ""
        if not (cache / f"datasets--{name.replace('/', '--')}").is_dir() and not any(prepared.glob(f"{organization}*")):
            problems.append(f"dataset {name!r} is no local file, and {why}: {remedy}")
    if problems:
        raise ValueError(listed(problems))
    if is_rank_zero():
        print(f"{why}: names of the hub are read from the caches of earlier downloads", file=sys.stderr, flush=True)


def _require_pretrained(name: str | None) -> None:
    """Raise ``ValueError`` if ``model.pretrained`` is no directory with a model."""
    # Of an export that was cut off, what reads the directory knows the remedy.
    if name is None or any(Path(name).parent.glob(f".{Path(name).name}.*")):
        return
    path = Path(name)
    if path.is_file():
        raise ValueError(f"model.pretrained {name} is a file: name its directory, {path.absolute().parent}")
    if path.is_dir():
        if any(path.glob("checkpoints/step_*")):
            raise ValueError(
                f"model.pretrained {name} is a run: name its export, model.warm_start for its newest weights, or "
                "trainer.resume_from to continue it"
            )
        if not any((path / each).is_file() for each in ("config.json", "adapter_config.json")) and not any(
            path.glob("*.gguf")
        ):
            raise ValueError(f"model.pretrained {name} has no config.json: copy it from where the weights came from")
        return
    remedy = "name a directory in Hugging Face format"
    if len(Path(name).parts) == 2 and not Path(name).is_absolute():
        remedy = f"of a model of the Hugging Face Hub, run hf download {name} --local-dir DIRECTORY and name DIRECTORY"
    raise ValueError(f"model.pretrained {name} does not exist: {remedy}")


def _require_hub_name(name: str | None) -> None:
    """Raise ``ValueError`` if the name of a tokenizer without a directory is a path, and not one of the hub."""
    if name is not None and (Path(name).is_absolute() or name.startswith(".") or len(Path(name).parts) > 2):
        raise ValueError(f"model.tokenizer {name} does not exist: name a directory with a tokenizer")


def _is_on_hub(name: str) -> bool:
    """Return whether a dataset is neither local nor part of Python.

    Raises:
        ValueError: it is local, and does not exist.
    """
    if name in OTHER_DATA:
        return False
    if Path(name).suffix == INDEXED:
        if not Path(name).is_file():
            raise ValueError(
                f"dataset {name!r} cannot be read: no such file; a relative path is looked for in {Path.cwd()}"
            )
        return False
    files = local_files(name)
    if files and not any(path.stat().st_size for path in files):
        raise ValueError(f"dataset {name!r} is empty: it has no documents")
    return not files and not is_saved(name) and not is_repository(Path(name))


def _answers(endpoint: str) -> bool:
    """Return whether a server answers a request within seconds, with any status."""
    # One request with a short limit: the hub's libraries repeat each of theirs for half a minute. They use the
    # proxies of the environment too.
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except HTTPError:
        return True
    except URLError as error:
        # Which certificates to trust is the libraries' own affair: the server has answered.
        return isinstance(error.reason, SSLError)
    except OSError:
        return False
    return True
