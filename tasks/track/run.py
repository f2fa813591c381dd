"""The MLflow run of a pipeline: the flow creates it and ends it with its true status.

`metrics_upload` adds the metrics of ranks during training.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import yaml
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from paceline.conf.config import Config
from paceline.conf.load import flatten
from paceline.tasks.errors import InputError
from paceline.tasks.files import sync_tree
from paceline.tasks.names import Artifact, Status, Tag
from paceline.tasks.records.data import PreparedSet
from paceline.tasks.records.record import Record
from paceline.tasks.redact import redact, redact_tree
from paceline.tasks.track.connectivity import check_reachable
from paceline.tasks.track.store import local_path, open_store, sqlite_path

Role = Literal["run", "study", "sweep", "advise", "predict", "classify", "no-gpu", "doctor", "watch", "judge"]
NestedRole = Literal["arm", "trial"]
PARENT_ID_TAGS: dict[NestedRole, str] = {"arm": Tag.STUDY_RUN_ID, "trial": Tag.SWEEP_RUN_ID}
"""Of a run inside another one: the tag with the other one's id."""
MAX_PARAM_CHARACTERS = 6000
TEXT_FILES = (".txt", ".jsonl")  # suffixes of files that others have written: logs, reasons why samples were rejected


class RunHandle(Record):
    """Identity of a run; plain data that other processes can use."""

    tracking_uri: str
    experiment: str
    experiment_id: str
    run_id: str

    @property
    def public_uri(self) -> str:
        """Address of the store without credentials."""
        return redact(self.tracking_uri)

    @property
    def client(self) -> MlflowClient:
        """A client of the run's store."""
        return MlflowClient(self.tracking_uri)


def begin(
    tracking_uri: str, experiment_id: str, config: Config, tags: dict[str, str], name: str | None = None
) -> RunHandle:
    """Create a RUNNING run with its tags, named after the configuration or `name`; the caller must `finish` it."""
    return begin_named(tracking_uri, config.track.experiment, experiment_id, name or config.name, tags)


def begin_named(tracking_uri: str, experiment: str, experiment_id: str, name: str, tags: dict[str, str]) -> RunHandle:
    """Create a RUNNING run without a configuration; the caller must `finish` it."""
    run_id = MlflowClient(tracking_uri).create_run(experiment_id, run_name=name, tags=tags).info.run_id
    return RunHandle(tracking_uri=tracking_uri, experiment=experiment, experiment_id=experiment_id, run_id=run_id)


def log_config(handle: RunHandle, config: Config) -> None:
    """Log the parameters and the configuration itself, from which a resume reads it."""
    params = [Param(key, redact(str(value))[:MAX_PARAM_CHARACTERS]) for key, value in flatten(config).items()]
    handle.client.log_batch(handle.run_id, params=params)
    log_document(handle, Artifact.CONFIG, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    _sync_artifacts(handle)


def reopen(tracking_uri: str, run_id: str) -> tuple[RunHandle, dict[str, Any]]:
    """Find an unfinished run by id; return it with its configuration as a plain tree. It stays as it is until `revive`.

    Raises InputError: the run does not exist, is finished, or is not a run of Paceline.
    """
    check_reachable(tracking_uri)
    try:
        file = sqlite_path(tracking_uri)
        if file is not None and not file.exists():
            raise FileNotFoundError(file)  # opening it would create an empty store
        client = open_store(tracking_uri)
        run = client.get_run(run_id)
        with tempfile.TemporaryDirectory() as directory:
            path = client.download_artifacts(run_id, Artifact.CONFIG, directory)
            tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        experiment_id = run.info.experiment_id
        experiment = client.get_experiment(experiment_id).name
    except (MlflowException, OSError) as error:
        fault = f"--resume {run_id}: no such run of paceline in {redact(tracking_uri)}"
        raise InputError(f"{fault}; see paceline ui for the ids") from error
    if not isinstance(tree, dict):
        raise InputError(
            f"--resume {run_id}: {Artifact.CONFIG} of the run is damaged; start a new one with paceline run"
        )
    if run.info.status == "FINISHED":
        raise InputError(f"--resume {run_id}: the run is FINISHED; start a new one with paceline run")
    handle = RunHandle(tracking_uri=tracking_uri, experiment=experiment, experiment_id=experiment_id, run_id=run_id)
    return handle, tree


def revive(handle: RunHandle, tags: dict[str, str]) -> None:
    """Set a reopened run RUNNING again."""
    handle.client.update_run(handle.run_id, status="RUNNING")
    handle.client.log_batch(handle.run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def log_dataset(handle: RunHandle, prepared: PreparedSet, name: str) -> None:
    """Record the prepared set as the run's dataset input, with its content fingerprint as digest."""
    source = CodeDatasetSource(tags={Tag.KEY: prepared.key})
    # Its `profile` has a default, which stubs do not show.
    dataset = MetaDataset(source, name=name, digest=prepared.fingerprint)  # type: ignore[abstract]
    entity = DatasetInput(dataset._to_mlflow_entity(), tags=[InputTag("mlflow.data.context", "training")])
    try:
        handle.client.log_inputs(handle.run_id, datasets=[entity])
    except MlflowException:
        # Of runs that begin at the same moment with one data set all but one may be refused (UNIQUE constraint of
        # MLflow's store, 3.17); afterwards it is there.
        handle.client.log_inputs(handle.run_id, datasets=[entity])


def log_facts(handle: RunHandle, metrics: dict[str, float | None], tags: dict[str, str]) -> None:
    """Log final metrics and tags; unknown metrics are left out."""
    now = int(time.time() * 1000)  # of two values of a step MLflow keeps the later one, and of one time the larger
    logged = [Metric(key, float(value), now, 0) for key, value in metrics.items() if value is not None]
    noted = [RunTag(key, redact(value)[:5000]) for key, value in tags.items()]
    handle.client.log_batch(handle.run_id, metrics=logged, tags=noted)


def log_interval(handle: RunHandle, name: str, value: float | None, low: float | None, high: float | None) -> None:
    """Log a metric as three steps of one moment, so that a chart over time draws it as an error bar."""
    if value is None or low is None or high is None:
        return
    now = int(time.time() * 1000)
    steps = [Metric(name, float(point), now, step) for step, point in enumerate((low, high, value))]
    handle.client.log_batch(handle.run_id, metrics=steps)


def log_document(handle: RunHandle, name: str, content: dict[str, Any] | str | bytes | Path) -> None:
    """Store an artifact: JSON from a dict, text, bytes, or an existing file; `name` may hold folders.

    Credentials are taken out of dicts and texts, those in files of text included.
    """
    if isinstance(content, Path) and content.suffix in TEXT_FILES:
        content = content.read_text(encoding="utf-8", errors="replace")
    if isinstance(content, dict):
        content = json.dumps(redact_tree(content), indent=2).encode()
    elif isinstance(content, str):
        content = redact(content).encode()
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / Path(name).name
        target.write_bytes(content.read_bytes() if isinstance(content, Path) else content)
        folder = str(Path(name).parent) if Path(name).parent.parts else None
        handle.client.log_artifact(handle.run_id, str(target), folder)


def _sync_artifacts(handle: RunHandle) -> None:
    """Push the run's artifacts to the disk if they are files: after a loss of power, MLflow's would be empty."""
    directory = local_path(handle.client.get_run(handle.run_id).info.artifact_uri)
    if directory is not None and directory.exists():  # it comes with the first artifact
        sync_tree(directory)


def finish(handle: RunHandle, status: Status, error: str | None = None) -> None:
    """Set the run's true final status."""
    if status == "FINISHED":
        _sync_artifacts(handle)
    if error is not None:
        handle.client.set_tag(handle.run_id, Tag.ERROR, redact(error)[:5000])
    handle.client.set_terminated(handle.run_id, status)


def set_tags(handle: RunHandle, tags: dict[str, str]) -> None:
    """Set tags of a run."""
    log_facts(handle, {}, tags)


def tag(handle: RunHandle, name: str) -> str | None:
    """A tag of the run, None if it has none of that name."""
    value: str | None = handle.client.get_run(handle.run_id).data.tags.get(name)
    return value
