"""Reads a YAML configuration file strictly: repeated names are refused, and 1e-4 is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, without its two silent surprises.

    If a key occurs twice, PyYAML silently keeps the last value only. It follows YAML 1.1, which reads
    ``1e-4`` as a text because it has no decimal point.
    """

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping of ``node``.

        Raises:
            ValueError: a key is duplicated, or is a list or a mapping.
        """
        lines: dict[Hashable, int] = {}
        # Duplicates are looked for before merge keys (<<) are expanded: a key may override one that comes from <<.
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ValueError(f"line {line} has a list or mapping as a key: write NAME: VALUE")
            if key in lines:
                raise ValueError(f"{key!r} is on line {lines[key]} and again on line {line}: merge the two into one")
            lines[key] = line
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: the text is not YAML, or repeats a name in one mapping.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        remedy = ""
        if "'\\t'" in str(error):
            remedy = ": indent with spaces instead of tabs"
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}{remedy}") from error


def read_yaml_file(path: Path) -> Any:
    """Return the content of a YAML file; an empty file is an empty mapping.

    Raises:
        ValueError: the file is missing, is not a UTF-8 text, or is not valid; the message names
            the file.
    """
    if path.is_dir():
        raise ValueError(f"configuration file {path} is a directory: name a YAML file in it")
    if not path.is_file():
        raise ValueError(f"configuration file {path} does not exist: pass --config with an existing YAML file")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"configuration file {path} is not a text in UTF-8 ({error}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"configuration file {path}: {error}") from error
    if values is None:
        return {}
    return values
