"""What an upgrade carries over of prepared sets, unfinished runs and deployments; each that it cannot is named."""

import json
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

from infra.services.site import Site
from infra.services.start import Say
from paceline.conf.hints import HintedError
from paceline.conf.load import validate
from paceline.flows.lifecycle.mlflow_run import ARTIFACTS, RESUMABLE
from paceline.tasks.data.decode.transform import PHOTOGRAPH_VERSION, TRANSFORM_VERSION
from paceline.tasks.data.prepare import manifest
from paceline.tasks.errors import one_line
from paceline.tasks.fingerprint import code_fingerprint
from paceline.tasks.http import ask
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.data import PARTITIONS
from paceline.tasks.track.queries import find_runs, read_document
from paceline.tasks.track.run import reopen
from paceline.tasks.track.store import existing_client

Finding = tuple[str, str | None]  # an item, and why it cannot be carried over


def report(site: Site, say: Say) -> None:
    """Name what this version cannot carry over."""
    for kind, find in (("prepared set", _prepared), ("unfinished run", _runs), ("deployment", _deployments)):
        findings = list(find(site))
        lost = [(item, reason) for item, reason in findings if reason is not None]
        say(f"carried over: {len(findings) - len(lost)} of {len(findings)} {kind}s")
        for item, reason in lost:
            say(f"not carried over: {kind} {item}: {reason}")


def _prepared(site: Site) -> Iterator[Finding]:
    versions = {name: metadata.version(name) for name in ("numpy", "pillow", "simplejpeg")}
    versions["transform"] = f"{TRANSFORM_VERSION}.{PHOTOGRAPH_VERSION}"
    for path in sorted((site.paceline_home / "prepared").glob("[!.]*")):
        try:
            is_own = (path / PARTITIONS).is_dir()
            facts = manifest.read_as(path, manifest.PartitionsManifest if is_own else manifest.Manifest).provenance
        except manifest.DamagedError as error:
            yield path.name, f"{one_line(error)}; it is prepared again"
            continue
        other = [f"{name} {facts[name]}" for name, now in versions.items() if facts.get(name, now) != now]
        yield path.name, f"made with {', '.join(other)}; it is prepared again" if other else None


def _runs(site: Site) -> Iterator[Finding]:
    tracking_uri = site.facts["mlflow_url"]
    for experiment in existing_client(tracking_uri).search_experiments():
        for run in find_runs(tracking_uri, experiment.name, "attributes.status != 'FINISHED'", None):
            if run.tags.get(Tag.ROLE) not in RESUMABLE:
                continue
            yield (
                f"{run.run_id} ({run.tags[Tag.ROLE]} in {experiment.name})",
                _why_not(tracking_uri, experiment.name, run.run_id, run.tags),
            )


def _why_not(tracking_uri: str, experiment: str, run_id: str, tags: dict[str, str]) -> str | None:
    """Why an unfinished run cannot be resumed by this version."""
    try:
        _, tree = reopen(tracking_uri, run_id)
        validate({name: section for name, section in tree.items() if name != "cluster"})
    except HintedError as error:
        return one_line(error)
    if tags[Tag.ROLE] in ARTIFACTS:
        arms = find_runs(tracking_uri, experiment, f"tags.`{Tag.PARENT}` = '{run_id}'")
        codes = {(read_document(tracking_uri, arm.run_id, Artifact.ENVIRONMENT) or {}).get("code") for arm in arms}
        if codes - {None, code_fingerprint()}:
            return "its arms would be of different code; start it again"
    return None


def _deployments(site: Site) -> Iterator[Finding]:
    user = site.client_environment()["PREFECT_API_AUTH_STRING"]
    for deployment in json.loads(ask(f"{site.facts['prefect_url']}/deployments/filter", user, {})):
        yield deployment["name"], _why_no_flow(deployment["entrypoint"], deployment["parameters"])


def _why_no_flow(entrypoint: str | None, parameters: dict[str, Any]) -> str | None:
    """Why a deployment's flow does not take its parameters; None for flows of others, which are not ours to judge."""
    module, _, name = (entrypoint or "").replace(":", ".").rpartition(".")
    if not module.startswith("paceline."):
        return None
    try:
        getattr(import_module(module), name).validate_parameters(parameters)
    except Exception as error:  # noqa: BLE001  whatever the old parameters lead to
        return f"{one_line(error)[:300]}; deploy it again"
    return None
