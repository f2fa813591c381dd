"""Prints a configuration: every setting, its value, the reason of each `auto`, and its help."""

from __future__ import annotations

import textwrap

from pydantic import BaseModel

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.load import flatten
from paceline.flows.checks.training_host import training_host
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.tls import choose_tls
from paceline.tasks.data.key import describe as list_data
from paceline.tasks.errors import InputError
from paceline.tasks.records import Choice
from paceline.tasks.train.plan import resolve

HELP_WIDTH = 110


def describe(config: Config, key_width: int) -> str:
    """Describe each setting in one paragraph, in the order of the schema."""
    helps = _helps(type(config))
    choices = _choices(config)
    lines = []
    for key, value in flatten(config).items():
        choice = choices.get(key)
        shown = f"{value} -> {choice.value}  ({choice.reason})" if choice else f"{value}"
        lines.append(f"{key:<{key_width}} {shown}")
        lines += textwrap.wrap(helps[key], HELP_WIDTH, initial_indent="    ", subsequent_indent="    ")
    script = kind_of(config.cluster).job_script(config, Environment())
    if script:
        lines += ["", f"The job script, for each of {config.execution.num_nodes} hosts:", "", script]
    return "\n".join(lines)


def _choices(config: Config) -> dict[str, Choice]:
    """Resolve each `auto` here, as far as that is possible without the data."""
    tls = {"cluster.tls": choose_tls(config.cluster)} if config.cluster.tls == "auto" else {}
    return {f"execution.{name}": choice for name, choice in _execution_choices(config).items()} | tls


def _execution_choices(config: Config) -> dict[str, Choice]:
    if not kind_of(config.cluster).has_known_hardware:
        later = Choice(value="to be chosen", reason="by the hardware of the hosts that the cluster gives")
        return {name: later for name, value in flatten(config.execution).items() if value == "auto"}
    try:
        num_train = list_data(config.data).num_train
    except InputError:
        num_train = None  # data.root is not set yet
    choices = dict(resolve(config, training_host(config, Environment()), num_train or 0).reasons)
    if num_train is None and "loading" in choices:
        choices["loading"] = Choice(value="to be chosen", reason="by the size of the data, once data.root is given")
    return choices


def _helps(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    helps: dict[str, str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            helps |= _helps(field.annotation, f"{prefix}{name}.")
        else:
            helps[prefix + name] = " ".join((field.description or "").split())
    return helps
