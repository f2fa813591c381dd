"""What an upgrade carries over of sets, runs, workloads, services and deployments; each that it cannot is named."""

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from infra.services.site import Site
from infra.services.start import Say
from paceline.conf.hints import HintedError
from paceline.conf.load import is_lightning, load, validate
from paceline.flows.lifecycle.mlflow_run import ARTIFACTS, RESUMABLE
from paceline.tasks.data.key import TRANSFORM
from paceline.tasks.data.prepare import manifest
from paceline.tasks.data.sources.registry import DECODERS
from paceline.tasks.errors import one_line
from paceline.tasks.fingerprint import code_fingerprint, workload_fingerprint
from paceline.tasks.http import ask
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.records.data import PARTITIONS
from paceline.tasks.track.queries import find_runs, read_artifact, read_document
from paceline.tasks.track.run import reopen
from paceline.tasks.track.store import existing_client

PATTERN = re.compile(r"[\w.]+=")  # of a setting in a file of `serve`
Finding = tuple[str, str | None]  # an item, and why it cannot be carried over


def report(site: Site, say: Say) -> None:
    """Name what this version cannot carry over."""
    for kind, find in (
        ("prepared set", _prepared),
        ("unfinished run", _runs),
        ("workload", _workloads),
        ("scheduled service", _served),
        ("deployment", _deployments),
    ):
        findings = list(find(site))
        lost = [(item, reason) for item, reason in findings if reason is not None]
        say(f"carried over: {len(findings) - len(lost)} of {len(findings)} {kind}s")
        for item, reason in lost:
            say(f"not carried over: {kind} {item}: {reason}")


def _prepared(site: Site) -> Iterator[Finding]:
    installed = {canonicalize_name(each.name): each.version.split("+")[0] for each in metadata.distributions()}
    now = installed | DECODERS | {"transform": TRANSFORM}
    for path in sorted((site.paceline_home / "prepared").glob("[!.]*")):
        try:
            is_own = (path / PARTITIONS).is_dir()
            facts = manifest.read_as(path, manifest.PartitionsManifest if is_own else manifest.Manifest).provenance
        except manifest.DamagedError as error:
            yield path.name, f"{one_line(error)}; it is prepared again"
            continue
        decisive = {name: version for name, version in facts.items() if name not in manifest.CIRCUMSTANCES}
        other = [
            f"{name} {version}, and now it is {now.get(name, 'not there')}"
            for name, version in decisive.items()
            if now.get(name) != version
        ]
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


def _workloads(site: Site) -> Iterator[Finding]:
    """Each workload by its newest finished run: whether a run with its settings would be its next one."""
    tracking_uri, seen = site.facts["mlflow_url"], set()
    for run in find_runs(tracking_uri, None, "attributes.status = 'FINISHED'", None):
        workload = run.tags.get(Tag.WORKLOAD)
        if run.tags.get(Tag.ROLE) == "run" and workload is not None and workload not in seen:
            seen.add(workload)
            yield f"{workload} (run {run.run_id})", _why_other(tracking_uri, run.run_id, run.tags)


def _why_other(tracking_uri: str, run_id: str, tags: dict[str, str]) -> str | None:
    """Why this version does not train the workload of a finished run; None also where the run has no record of it."""
    tree = yaml.safe_load(read_artifact(tracking_uri, run_id, Artifact.CONFIG) or b"")
    if not isinstance(tree, dict):
        return None
    try:
        config = validate({name: section for name, section in tree.items() if name != "cluster"})
    except HintedError as error:
        return f"{one_line(error)}; its runs stay, and a new one needs other settings"
    if config.lightning.settings or config.model.pretrained or Tag.DATASET not in tags:
        return None  # its fingerprint depends on files that are not here
    now = workload_fingerprint(config.workload, tags[Tag.DATASET])
    return None if now == tags[Tag.WORKLOAD] else f"it is {now} now; its next run is not compared with those before"


def _served(site: Site) -> Iterator[Finding]:
    for path in sorted((site.home.root / "serve").glob("[!.]*")):
        words = shlex.split(path.read_text(encoding="utf-8"), comments=True)
        preset, overrides = words[0] if words else "", [word for word in words[1:] if PATTERN.match(word)]
        try:
            if not preset.startswith("-") and not is_lightning(preset):
                load(preset, overrides)
            yield path.name, None
        except HintedError as error:
            yield path.name, f"{one_line(error)}; correct {path}"


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
