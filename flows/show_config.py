"""A configuration as YAML that can be saved as a preset, with the value and the reason of each `auto`."""

from typing import Any

from pydantic import BaseModel

from paceline.conf.config import Config
from paceline.conf.environment import Environment
from paceline.conf.hints import yaml_text
from paceline.conf.load import flatten
from paceline.flows.checks.preflight import training_host
from paceline.tasks.cluster.kinds import kind_of
from paceline.tasks.cluster.tls import choose_tls
from paceline.tasks.data.key import describe as list_data
from paceline.tasks.errors import InputError
from paceline.tasks.records.record import Choice
from paceline.tasks.train.plan import resolve

OTHERS = {
    "execution.strategy": Choice(value="none", reason="a single rank shares its work with no other"),
    "data.storage": Choice(value="to be chosen", reason="raw unless the pixels exceed a quarter of the memory"),
    "cluster.num_workers": Choice(
        value="to be chosen", reason="one worker per rank, and also one per core if data are still to be prepared"
    ),
    "speedup.factors": Choice(
        value="to be chosen", reason="a ladder with speedup.diagnose, where its arms fit into memory"
    ),
    "speedup.starts": Choice(value="to be chosen", reason="2 to 5 in a twentieth of the training's time, or none"),
    "speedup.steps_per_block": Choice(value="to be chosen", reason="enough steps for a block of a quarter of a second"),
}
"""Choices for `auto` values that the plan of a run does not decide."""


def show_yaml(config: Config) -> str:
    """The configuration as a preset; a comment gives the value and the reason of each `auto`."""
    lines = [
        "# Save this as FILE.yaml and start it with: paceline run FILE.yaml",
        *_yaml_lines(config, _choices(config), "", ""),
    ]
    script = kind_of(config.cluster).job_script(config, Environment())
    if script:
        lines += ["", f"# The job script, for each of {config.execution.num_nodes} hosts:", "#"]
        lines += [f"# {line}".rstrip() for line in script.splitlines()]
    return "\n".join(lines)


def show_json(config: Config) -> dict[str, Any]:
    """The configuration, and the value and the reason of each `auto`."""
    choices = {key: {"value": str(choice.value), "reason": choice.reason} for key, choice in _choices(config).items()}
    return {"config": config.model_dump(mode="json"), "choices": choices}


def _yaml_lines(section: BaseModel, choices: dict[str, Choice], prefix: str, indent: str) -> list[str]:
    lines = []
    for name in type(section).model_fields:
        value, key = getattr(section, name), prefix + name
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_yaml_lines(value, choices, f"{key}.", f"{indent}  ")]
            continue
        choice = choices.get(key)
        comment = f"  # -> {choice.value} ({' '.join(choice.reason.split())})" if choice else ""
        lines.append(f"{indent}{name}: {yaml_text(value)}{comment}")
    return lines


def _choices(config: Config) -> dict[str, Choice]:
    """Resolve each `auto` here, as far as that is possible without the data."""
    if kind_of(config.cluster).has_known_hardware:
        try:
            num_train = list_data(config.data).num_train
        except InputError:
            num_train = None  # data.root is not set yet
        choices = dict(resolve(config, training_host(config, Environment()), num_train or 0).reasons)
        if num_train is None and "loading" in choices:
            choices["loading"] = Choice(value="to be chosen", reason="by the size of the data, once data.root is given")
    else:
        later = Choice(value="to be chosen", reason="by the hardware of the hosts that the cluster gives")
        choices = dict.fromkeys(flatten(config.execution), later)
    side, reason = config.stored_size
    every = OTHERS | {"data.stored_size": Choice(value=side, reason=reason), "cluster.tls": choose_tls(config.cluster)}
    every |= {f"execution.{name}": choice for name, choice in choices.items()}
    return {key: every[key] for key, value in flatten(config).items() if value == "auto" and key in every}
