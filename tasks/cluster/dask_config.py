"""Dask settings that keep its overhead off the cores that ranks train on; see conf/dask/dask.yaml."""

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from paceline.conf.load import DASK_SETTINGS
from paceline.tasks import log_lines

ENVIRON = "distributed.nanny.pre-spawn-environ."  # variables that nannies give to their workers


@cache
def low_overhead_config() -> dict[str, Any]:
    """Settings for `dask.config.set` while a cluster starts; nannies and SSH pass them on to the workers."""
    settings = dict(_flat(yaml.safe_load(DASK_SETTINGS.read_text(encoding="utf-8"))))
    return settings | ({ENVIRON + log_lines.VARIABLE: "json"} if log_lines.is_json() else {})


def exports() -> list[str]:
    """The same as lines of a shell, for a worker that a batch system starts."""
    lines = []
    for name, value in low_overhead_config().items():
        variable = name.removeprefix(ENVIRON)  # a nanny keeps the value of such a variable
        if variable == name:
            variable = "DASK_" + name.replace(".", "__").replace("-", "_").upper()
        lines.append(f"export {variable}={shlex.quote(str(value))}")
    return lines


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value
