"""Models by name: from a run, from the registry by version or alias, or from a directory."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

import mlflow.artifacts
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.bundle import FACTS, WEIGHTS, digest_of, read_facts
from tasks.errors import InputError
from tasks.redact import redact
from tasks.track.store import check_reachable, sqlite_path

DIGEST_TAG = "paceline.model_digest"
"""Of a run: the digest of the model that it logged, description and weights."""
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def fetch_model(tracking_uri: str, reference: str, home: Path) -> Path:
    """Where the files of a model lie, seen by all who share `home`; they are fetched unless they are there already.

    Args:
        tracking_uri: the MLflow store.
        reference: `runs:/RUN_ID/model`, `models:/NAME/VERSION`, `models:/NAME@ALIAS`, a run's id, or a directory.
        home: state directory; fetched models are kept below it, by the digest of the model.

    Raises:
        InputError: there is no such model, or it is not as its run recorded it.
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
    try:
        place, recorded = _resolved(MlflowClient(tracking_uri, tracking_uri), uri)
        if recorded is not None and _is_whole(home / "models" / recorded, recorded):
            return home / "models" / recorded
        return _fetched(tracking_uri, place, recorded, home / "models")
    except (MlflowException, OSError) as error:
        reason = redact(" ".join(str(error).split()))[:200]
        raise InputError(f"{reference}: no such model in {redact(tracking_uri)} ({reason})") from error


def _fetched(tracking_uri: str, place: str, recorded: str | None, models: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=models, prefix=".") as temporary:
        found = Path(mlflow.artifacts.download_artifacts(place, dst_path=temporary, tracking_uri=tracking_uri))
        digest = digest_of(read_facts(found))
        if recorded is not None and recorded != digest:
            raise InputError(
                f"{place}: the model's digest is {digest[:12]}..., and its run recorded {recorded[:12]}...; "
                "it was changed after the training"
            )
        kept = models / digest
        if not _is_whole(kept, digest):
            if kept.exists():
                kept.rename(Path(temporary) / "damaged")
            with suppress(FileExistsError):  # another process was first
                found.rename(kept)
    return kept


def _is_whole(directory: Path, digest: str) -> bool:
    try:
        return digest_of(read_facts(directory)) == digest
    except InputError:
        return False


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
    digest: str | None = client.get_run(run_id).data.tags.get(DIGEST_TAG) if run_id else None
    return place, digest
