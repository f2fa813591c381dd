"""Models by name: from a run, from the registry by version or alias, or from a directory."""

import re
import tempfile
from contextlib import suppress
from pathlib import Path

import mlflow.artifacts
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.files import hold
from paceline.tasks.model_bundle import FACTS, WEIGHTS, Facts, digest_of, read_facts
from paceline.tasks.names import Tag
from paceline.tasks.redact import redact
from paceline.tasks.track.store import existing_client

RECORDED = ("runs:/", "models:/")
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def fetch_model(tracking_uri: str, reference: str, home: Path) -> tuple[Path, Facts]:
    """Fetch a model unless it is cached below `home` by digest; its directory, which is held, and its description.

    A reference is `runs:/RUN_ID/model`, `models:/NAME/VERSION`, `models:/NAME@ALIAS`, a run's id, or a directory. What
    reads as a name is never a directory, or one that lies in the right place could pass for a recorded model.

    Raises InputError: the model does not exist, or it differs from the record of its run.
    """
    uri = f"runs:/{reference}/model" if _RUN_ID.fullmatch(reference) else reference
    if not uri.startswith(RECORDED):
        directory = Path(reference).absolute()
        if (directory / FACTS).is_file():
            return directory, read_facts(directory)
        names = "a run's id, runs:/RUN_ID/model, models:/NAME@ALIAS, models:/NAME/VERSION"
        remedy = f"give {names} or a directory that holds {FACTS} and {WEIGHTS}"
        raise InputError(f"{reference} is not a model; {remedy}", setting="MODEL")
    client, models = existing_client(tracking_uri), home / "models"
    models.mkdir(parents=True, exist_ok=True)
    try:
        place, recorded = _resolve(client, uri)
        cached = _load_cached(models / recorded, recorded) if hold(models / recorded / FACTS) else None
        facts = cached or _fetch(tracking_uri, place, recorded, models)
    except (MlflowException, OSError) as error:
        reason = redact(one_line(error))[:200]
        raise InputError(f"{reference}: no such model in {redact(tracking_uri)} ({reason})", setting="MODEL") from error
    return models / digest_of(facts), facts


def has_recorded_digest(reference: str) -> bool:
    """Whether a run recorded the model's digest; a model in a directory has no record."""
    return reference.startswith(RECORDED) or _RUN_ID.fullmatch(reference) is not None


def _fetch(tracking_uri: str, place: str, recorded: str, models: Path) -> Facts:
    with tempfile.TemporaryDirectory(dir=models, prefix=".") as temporary:
        downloaded = Path(mlflow.artifacts.download_artifacts(place, dst_path=temporary, tracking_uri=tracking_uri))
        facts = read_facts(downloaded)
        digest = digest_of(facts)
        if recorded != digest:
            fault = f"{place}: the model's digest is {digest[:12]}..., and its run recorded {recorded[:12]}..."
            raise InputError(f"{fault}; it was changed after the training")
        target = models / digest
        hold(target / FACTS)
        if _load_cached(target, digest) is None:
            if target.exists():
                target.rename(Path(temporary) / "damaged")
            hold(downloaded / FACTS)  # before others can see it
            with suppress(FileExistsError):  # another process was first
                downloaded.rename(target)
    return facts


def _load_cached(directory: Path, digest: str) -> Facts | None:
    with suppress(InputError):
        facts = read_facts(directory)
        return facts if digest_of(facts) == digest else None
    return None


def _resolve(client: MlflowClient, uri: str) -> tuple[str, str]:
    """Location of a model's files, and the digest that its run recorded."""
    # The registry is asked here: MLflow's own download looks for models:/ in another store than the one it is given
    # (3.18), unless the environment names it.
    if uri.startswith("runs:/"):
        place, run_id = uri, uri.removeprefix("runs:/").partition("/")[0]
    else:
        name, at, alias = uri.removeprefix("models:/").partition("@")
        if at:
            model_version = client.get_model_version_by_alias(name, alias)
        else:
            name, _, version = name.rpartition("/")
            model_version = client.get_model_version(name, version)
        place = client.get_model_version_download_uri(model_version.name, model_version.version)
        run_id = model_version.run_id or ""
    digest = client.get_run(run_id).data.tags.get(Tag.MODEL_DIGEST, "") if run_id else ""
    if not _DIGEST.fullmatch(digest):
        fault = f"{uri}: no run has recorded what this model is, so a change would go unnoticed"
        remedy = "predict with a model that paceline has trained, or fetch it and give its directory, if you trust it"
        raise InputError(f"{fault}; {remedy}")
    return place, digest
