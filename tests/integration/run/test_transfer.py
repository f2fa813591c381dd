"""What was learned of some classes serves for others: through real ranks, the store and the program."""

import json
from pathlib import Path

import pytest
import torch

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.checks.pretrained import check_weights
from paceline.tasks.data.key import describe
from paceline.tasks.files import sha256_of
from paceline.tasks.model_bundle import FACTS, WEIGHTS, digest_of
from paceline.tasks.names import Tag
from paceline.tasks.records.data import ModelFacts
from paceline.tasks.track import run as tracking
from paceline.tasks.track.registry import register
from paceline.tasks.train.launch.coordinator import train_group
from tests.integration.conftest import SMALL
from tests.support.refusals import refused

FIRST, OTHERS = ("data.classes=['0','1','2','3','4']", "data.classes=['5','6','7','8','9']")


def found_for(*overrides):
    config = load("digits", [*SMALL, *overrides])
    return check_weights(config, describe(config.data), Environment())


def begun(make_job, *overrides):
    """A job with the weights that its configuration names."""
    job = make_job(*overrides)
    return job.model_copy(update={"pretrained": check_weights(job.config, describe(job.config.data), Environment())})


@pytest.fixture(scope="module")
def source(make_job, cluster_address):
    """Trained on the first five classes: its job and the file of its weights."""
    job = make_job(FIRST, "recipe.num_epochs=4")
    return job, Path(train_group(job, cluster_address).weights)


@pytest.fixture(scope="module")
def recorded(source):
    """The id of the source's run, which has its model as the product records it, as version 1 of `source`."""
    job, weights = source
    handle = tracking.RunHandle(
        tracking_uri=job.tracking_uri, experiment="training", experiment_id="1", run_id=job.run_id
    )
    kept = {"image_shape", "class_names", "target_names", "mean", "std", "fingerprint"}
    facts = ModelFacts(
        model=job.config.model, weights_sha256=sha256_of(weights), **job.prepared.model_dump(include=kept)
    )
    tracking.log_document(handle, f"model/{FACTS}", facts.model_dump_json().encode())
    tracking.log_document(handle, f"model/{WEIGHTS}", weights)
    tracking.set_tags(handle, {Tag.MODEL_DIGEST: digest_of(facts)})
    register(handle, "source", {})
    return job.run_id


def state_of(path):
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "trained"),
    [
        ("backbone", ()),
        ("features.3", ("features.4", "features.5", "features.8", "features.9")),
    ],
)
def test_what_is_frozen_comes_out_of_two_ranks_as_it_went_in(layer, trained, source, make_job, cluster_address):
    _, weights = source
    job = begun(make_job, OTHERS, f"model.pretrained={weights}", f"model.freeze={layer}", "execution.num_devices=2")
    assert job.pretrained.reinitialized == ()
    result = train_group(job, cluster_address)
    before, after = state_of(weights), state_of(result.weights)
    changed = {name.rpartition(".")[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"classify", *trained}, "running statistics are those of before, too"
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize(
    ("layer", "data"),
    [
        ("features.99", ("convblocks", "features", "features.0", "features.1", "features.4")),
        ("features.1.weight", ("convblocks", "features.0")),
        ("classify", ("classify",)),
    ],
)
def test_a_layer_that_cannot_stay_is_refused(layer, data, source):
    with refused("model.freeze", f"model.freeze={layer}", *data):
        found_for(OTHERS, f"model.pretrained={source[1]}", f"model.freeze={layer}")


def test_a_rate_of_a_backbone_of_which_nothing_is_trained_is_refused(source):
    frozen = ("model.freeze=features", "recipe.backbone_rate=0.5")
    with refused("recipe.backbone_rate", "recipe.backbone_rate=0.5", "model.freeze=features"):
        found_for(OTHERS, f"model.pretrained={source[1]}", *frozen)


def test_models_by_name_have_heads_for_their_own_classes(recorded):
    for reference in (recorded, f"runs:/{recorded}/model", "models:/source/1"):
        found = found_for(OTHERS, f"model.pretrained={reference}")
        assert found.reinitialized == ("classify.weight", "classify.bias"), "as many classes, but others"
        assert found.sha256 == sha256_of(Path(found.path))
    assert found_for(FIRST, f"model.pretrained={recorded}").reinitialized == ()


def test_a_model_of_another_width_is_refused_with_its_settings(recorded):
    with refused("model.pretrained", recorded, "model.name=convblocks", "model.width=4", "model.depth=1"):
        found_for(OTHERS, f"model.pretrained={recorded}", "model.width=8")


def test_a_file_is_kept_by_its_content_where_all_ranks_see_it(source, tmp_path):
    _, weights = source
    path = tmp_path / "weights.pt"
    path.write_bytes(weights.read_bytes())
    found = found_for(OTHERS, f"model.pretrained={path}")
    path.unlink()
    assert found.path == str(Environment().root / "pretrained" / f"{found.sha256}.pt")
    assert sha256_of(Path(found.path)) == found.sha256


@pytest.mark.slow
def test_the_program_says_what_a_run_began_with(recorded, paceline):
    tail = [*SMALL, OTHERS, f"model.pretrained={recorded}", "recipe.backbone_rate=0.1", "--json"]
    process = paceline("run", "digits", *tail)
    out, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    summary = json.loads(out.splitlines()[-1])
    assert summary["pretrained"]["anew"] == ["classify.weight", "classify.bias"]
    run = tracking.MlflowClient(Environment().tracking_uri).get_run(summary["run_id"])
    assert "by the seed: classify.weight, classify.bias" in run.data.tags["paceline.pretrained"]
    assert recorded in run.data.tags["paceline.pretrained"]
    assert "Initial weights: " in told
    facts = tracking.MlflowClient(Environment().tracking_uri).download_artifacts(summary["run_id"], f"model/{FACTS}")
    described = ModelFacts.model_validate_json(Path(facts).read_text())
    assert described.model.pretrained is None
    assert digest_of(described) == run.data.tags[Tag.MODEL_DIGEST]


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution",
    [("execution.compile=step",), ("execution.strategy=fsdp", "execution.num_devices=2")],
    ids=["compiled", "sharded"],
)
def test_a_frozen_backbone_however_it_is_executed(execution, source, make_job, cluster_address):
    _, weights = source
    job = begun(make_job, OTHERS, f"model.pretrained={weights}", "model.freeze=backbone", *execution)
    result = train_group(job, cluster_address)
    before, after = state_of(weights), state_of(result.weights)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"classify.weight", "classify.bias"}
    assert result.losses[-1] < result.losses[0]


@pytest.mark.slow
def test_a_training_with_two_rates_resumes_bit_for_bit(source, make_job, cluster_address):
    _, weights = source
    settings = [OTHERS, f"model.pretrained={weights}", "recipe.backbone_rate=0.1", "execution.checkpoint_steps=10"]
    job = begun(make_job, *settings)
    first = train_group(job, cluster_address)
    expected = state_of(first.weights)
    (job.checkpoints / f"step-{first.num_steps:010d}.ckpt").unlink()
    resumed = train_group(job.model_copy(update={"resume": True}), cluster_address)
    assert 0 < resumed.first_step < first.num_steps
    assert resumed.losses == first.losses
    for name, tensor in state_of(resumed.weights).items():
        assert torch.equal(tensor, expected[name]), name
