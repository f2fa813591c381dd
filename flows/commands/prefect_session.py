"""How commands start and resume a flow."""

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.conf.lightning import Lightning
from paceline.conf.load import apply, validate_as
from paceline.flows.commands.console import json_stream, say, write_json
from paceline.tasks.errors import InputError

if TYPE_CHECKING:
    from paceline.flows.lifecycle.mlflow_run import Kind

SECTION = "cluster."
NO_CHANGES = {"preset", "overrides", "resume", "json", "diagnose", "quiet", "verbose", "log_format", "help"}
"""Arguments that do not change the request of a study or a sweep that is resumed."""


def enable_gc() -> None:
    """Collect garbage from now on, except for imported objects; until then a command starts faster."""
    gc.freeze()
    gc.enable()


@contextmanager
def quiet_flow(environment: Environment) -> Iterator[None]:
    """Use Prefect's settings for a flow started here: those of the temporary API, if there is no server.

    Heartbeats report to a server which runs are alive. No one reads them on the temporary one, and the flow would wait
    a second for their thread at its end.
    """
    from paceline.flows.lifecycle import prefect_api

    api = prefect_api.prepare_api(environment)
    from prefect import settings

    enable_gc()
    if api is None:
        yield
        return
    url = api.url(settings.get_current_settings().server.ephemeral.startup_timeout_seconds)
    changes = {
        settings.PREFECT_API_URL: url,
        settings.PREFECT_API_AUTH_STRING: api.auth,
        settings.PREFECT_UI_URL: "",  # there is none
        settings.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with settings.temporary_settings(changes):
        yield


def start_flow(
    options: Namespace,
    request: object,
    check: Callable[..., object],
    flow: Callable[..., dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Check a request, run its flow or resume it, and show the summary; the record `result` is not part of the JSON."""
    environment = Environment()
    how = {"resume": options.resume} if getattr(options, "resume", None) else {}
    check(request, environment, **how)
    with json_stream(options.json) as stream, quiet_flow(environment):
        summary = flow(request, **how)
        show(summary)
        write_json(stream, {key: value for key, value in summary.items() if key != "result"})


def take_cluster(tree: dict[str, Any], options: Namespace) -> None:
    """Replace the cluster of a stored configuration by the `cluster.*` settings of the command line, if there are any.

    Warns of the settings that are lost. Raises InputError if the run was on another kind of cluster than this host's,
    and the command line names none: a store that anyone may write to names no scheduler, see `checks.origin`.
    """
    stored = tree.pop("cluster", None)
    before = stored if isinstance(stored, dict) else {}
    apply(tree, *(override for override in options.overrides if override.startswith(SECTION)))
    named, default = tree.setdefault("cluster", {}), Cluster().model_dump(mode="json")
    kind = before.get("kind", default["kind"])
    if "kind" not in named and kind != default["kind"]:
        raise InputError(
            f"--resume {options.resume}: the run was on cluster.kind={kind}, and no setting of a cluster is taken from "
            f"the store; repeat its cluster.* settings, or give cluster.kind={default['kind']} for this host"
        )
    lost = [name for name in default if before.get(name, default[name]) != default[name] and name not in named]
    if lost:
        names = ", ".join(SECTION + name for name in lost)
        say(f"warning: not taken from the run: {names}; give again what you need")


def take_code(tree: dict[str, Any], options: Namespace) -> None:
    """Replace the directory of own Lightning code in a stored configuration by the run's own copy.

    Raises InputError: there is no copy, or a class is of a package that the configuration does not name.
    """
    from paceline.tasks.train.lightning import code

    own, copied = validate_as(Lightning, tree.get("lightning") or {}), None
    if own.code is not None:
        copied = Environment().root / "runs" / options.resume / code.FOLDER
        if not copied.is_dir():
            fault = f"--resume {options.resume}: there is no copy of its code in {copied}"
            raise InputError(fault, hint="start a new run", setting="--resume")
        tree["lightning"]["code"] = str(copied)
    code.require_named(own.settings, own.packages, copied)


def stored_request(options: Namespace, role: "Kind") -> dict[str, Any]:
    """Read the request of a study or a sweep to resume, which only settings of the cluster may change."""
    from paceline.flows.lifecycle.mlflow_run import load_request

    if options.preset is not None:
        options.overrides.insert(0, options.preset)  # with --resume every positional argument is an override
    is_changed = any(
        getattr(options, action.dest) != action.default
        for action in options.parser._actions
        if action.dest not in NO_CHANGES
    )
    if is_changed or not all(override.startswith(SECTION) for override in options.overrides):
        fault = f"--resume {options.resume} resumes the {role} as it was asked for"
        raise InputError(f"{fault}; give nothing else, except {SECTION}*")
    request = load_request(role, Environment(), options.resume)
    if isinstance(request.get("config"), dict):
        take_cluster(request["config"], options)
        take_code(request["config"], options)
    return request
