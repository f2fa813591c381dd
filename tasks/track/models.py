"""Models by name: from a run, from the registry by version or alias, or from a directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import mlflow.artifacts
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.bundle import FACTS, WEIGHTS, read_facts
from tasks.errors import InputError
from tasks.redact import redact
from tasks.track.store import check_reachable, sqlite_path

SHA_TAG = "paceline.model_sha256"
"""Of a run: the digest of the weights that it logged."""
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def fetch_model(tracking_uri: str, reference: str, home: Path) -> Path:
    """Where the files of a model lie, seen by all who share `home`; they are fetched unless they are there.

    Args:
        tracking_uri: the MLflow store.
        reference: `runs:/RUN_ID/model`, `models:/NAME/VERSION`, `models:/NAME@ALIAS`, a run's id, or a directory.
        home: state directory; fetched models are kept below it, by the digest of their weights.

    Raises:
        InputError: there is no such model, or its weights are not those that its run recorded.
    """
    if (Path(reference) / FACTS).is_file():
        directory = Path(reference).absolute()
        read_facts(directory)
        return directory
    uri = f"runs:/{reference}/model" if _RUN_ID.fullmatch(reference) else reference
    if not uri.startswith(("runs:/", "models:/")):
        raise InputError(
            f"{reference} is no model; give a run's id, runs:/RUN_ID/model, models:/NAME@ALIAS, models:/NAME/VERSION "
            f"or a directory that holds {FACTS} and {WEIGHTS}"
        )
    check_reachable(tracking_uri)
    file = sqlite_path(tracking_uri)
    if file is not None and not file.exists():
        raise InputError(f"{reference}: there is no MLflow store {file} yet; train a model first, or set PACELINE_HOME")
    (home / "models").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home / "models", prefix=".") as temporary:
        try:
            place, recorded = _resolved(MlflowClient(tracking_uri, tracking_uri), uri)
            found = Path(mlflow.artifacts.download_artifacts(place, dst_path=temporary, tracking_uri=tracking_uri))
        except (MlflowException, OSError) as error:
            reason = redact(" ".join(str(error).split()))[:200]
            raise InputError(f"{reference}: no such model in {redact(tracking_uri)} ({reason})") from error
        facts = read_facts(found)
        if recorded is not None and recorded != facts.weights_sha256:
            raise InputError(
                f"{reference}: its weights have sha256 {facts.weights_sha256[:12]}..., and its run recorded "
                f"{recorded[:12]}...; they were changed after the training"
            )
        kept = home / "models" / facts.weights_sha256
        if not (kept / FACTS).is_file():
            _keep(found, kept)
    return kept


def _keep(found: Path, kept: Path) -> None:
    """Under its final name as a whole, or not at all; another process may be first."""
    try:
        os.rename(found, kept)  # noqa: PTH104  Path.rename would replace an empty directory silently, too
    except OSError:
        if not (kept / FACTS).is_file():
            shutil.copytree(found, kept, dirs_exist_ok=True)


def _resolved(client: MlflowClient, uri: str) -> tuple[str, str | None]:
    """Where a model's files are, and the digest that its run recorded of them; None where no run did.

    The registry is asked here: MLflow's own download looks for models:/ in another store than the one it is given
    (3.18), unless the environment names it.
    """
    if uri.startswith("runs:/"):
        place, run_id = uri, uri.removeprefix("runs:/").partition("/")[0]
    else:
        name, at, alias = uri.removeprefix("models:/").partition("@")
        if at:
            found = client.get_model_version_by_alias(name, alias)
        else:
            name, _, version = name.rpartition("/")
            found = client.get_model_version(name, version)
        place, run_id = client.get_model_version_download_uri(found.name, found.version), found.run_id or ""
    digest: str | None = client.get_run(run_id).data.tags.get(SHA_TAG) if run_id else None
    return place, digest
