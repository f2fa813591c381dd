"""Which weights and code a prediction with own code takes from a run."""

import shutil

import pytest

from paceline.conf.environment import Environment
from paceline.conf.lightning import EXECUTION, FIXED
from paceline.conf.load import validate
from paceline.flows.predict.module import trained_in
from paceline.flows.predict.request import PredictRequest
from paceline.tasks.names import Artifact, Tag
from paceline.tasks.track import run as tracking
from paceline.tasks.track.store import check_store
from paceline.tasks.train.rank.checkpoint import checkpoint_path
from paceline.tasks.train.rank.checkpoint_io import write_with_digest
from tests.support.refusals import refused


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A home with a store."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return Environment()


def test_a_run_without_checkpoints_predicts_with_a_file_that_is_named(environment, tmp_path):
    uri, best = environment.tracking_uri, tmp_path / "best.ckpt"
    experiment = check_store(uri, "own", (tmp_path / "artifacts").as_uri())
    own = {"settings": {"model": {"class_path": "acme.Tagger"}}, "code": "/deleted"}
    tree = {"lightning": own, "execution": EXECUTION | {"precision": "auto"}, "speedup": FIXED["speedup"]}
    config = validate(tree)
    handle = tracking.begin(uri, experiment, config, {Tag.ROLE: "run"})
    tracking.log_config(handle, config)
    summary = {"train": {"best_models": [{"path": "gone.ckpt"}, {"path": str(best)}]}}
    tracking.log_document(handle, Artifact.SUMMARY, summary | {"execution": {"precision": "bf16-mixed"}})
    best.touch()
    directory = tmp_path / "runs" / handle.run_id

    def find(*overrides, source=None):
        return trained_in(PredictRequest(model=handle.run_id, source=source, overrides=overrides), environment)

    with refused("MODEL", directory):
        find("ckpt_path=best.ckpt")
    (directory / "code").mkdir(parents=True)
    found = find("ckpt_path=best.ckpt")
    assert found.checkpoint is None
    assert found.lightning.code == str(directory / "code")
    assert found.precision == "bf16-mixed"
    assert find(source="ckpt_path=best.ckpt") == found
    for given in ((), ("ckpt_path=",), ("ckpt_path=null",)):
        with refused("ckpt_path", directory) as refusal:
            find(*given)
        assert refusal.value.hint == f"add ckpt_path={best}"
    best.unlink()
    with refused("ckpt_path") as refusal:
        find()
    assert refusal.value.hint == "add ckpt_path=FILE"

    saved = checkpoint_path(directory / "checkpoints", 10)
    saved.parent.mkdir()
    write_with_digest(saved, {"step": 10}, directory / "attempt-0")
    assert find() == found._replace(checkpoint=saved)
    shutil.rmtree(saved.parent)
    tracking.set_tags(handle, {Tag.MODEL_DIGEST: "0" * 64})
    assert find() is None, "its logged model is taken"
    assert find("ckpt_path=best.ckpt") == found
