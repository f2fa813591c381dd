"""What `--resume` takes from the command line: settings of the cluster, which are never taken from the store."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from paceline.conf.environment import Environment
from paceline.flows.checks.origin import SECTION, replace_cluster
from paceline.flows.commands.console import say
from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from paceline.flows.lifecycle.request_artifact import Kind


def take_cluster(tree: dict[str, Any], options: Namespace) -> None:
    """Replace the `cluster.*` settings of a stored configuration by those of the command line; warn of the rest."""
    given = [override for override in options.overrides if override.startswith(SECTION)]
    left = replace_cluster(tree, given, options.resume)
    if left:
        say(f"warning: not taken from the run: {', '.join(SECTION + name for name in left)}; give again what you need")


def stored_request(options: Namespace, role: Kind, site: Environment, changed: bool) -> dict[str, Any]:
    """What a study or a sweep that is resumed was asked to do, on the cluster of the command line.

    Args:
        options: of the command; of its settings only `cluster.*` may be given.
        role: of the run: study, sweep or no-gpu.
        site: this machine's facts.
        changed: whether the command line asks for anything else.

    Raises:
        InputError: it does, or there is no such run.
    """
    from paceline.flows.lifecycle.request_artifact import load_request

    if options.preset is not None:
        options.overrides.insert(0, options.preset)  # with --resume every positional argument is an override
    if changed or not all(override.startswith(SECTION) for override in options.overrides):
        raise InputError(
            f"--resume {options.resume} resumes the {role} as it was asked for; give nothing else, except {SECTION}*"
        )
    request = load_request(role, site, options.resume)
    if isinstance(request.get("config"), dict):
        take_cluster(request["config"], options)
    return request
