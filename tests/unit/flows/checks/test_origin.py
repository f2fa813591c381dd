"""Schedulers that only the store or a form of Prefect names get no connection."""

import json

import pytest
import yaml
from mlflow import MlflowClient
from prefect.logging import disable_run_logger

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.conf.lightning import Lightning
from paceline.conf.load import load, load_plan
from paceline.flows.checks.origin import FLOW_RUN, allow, check_code, check_origin
from paceline.flows.checks.preflight import training_host
from paceline.flows.cli import main
from paceline.flows.lifecycle import mlflow_run
from paceline.flows.lifecycle.mlflow_run import ARTIFACTS
from paceline.flows.study.flow import check_study
from paceline.flows.study.trainings import StudyRequest
from paceline.tasks.names import Artifact
from paceline.tasks.track import run as tracking
from paceline.tasks.track.store import check_store
from tests.support.listeners import listening
from tests.support.refusals import check_data, refused

OF_SERVER = {"kind": "address", "address": "tcp://127.0.0.1:8786"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One store for all tests: to make one takes seconds."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def site(home, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("paceline.tasks.cluster.client.CONNECT_SECONDS", 2)
    return Environment()


@pytest.fixture
def as_deployment(site, monkeypatch):
    """As in a process that Prefect's runner has started for a flow run."""
    monkeypatch.setenv(FLOW_RUN, "00000000-0000-0000-0000-000000000000")


@pytest.fixture
def hostile():
    """A scheduler that says nothing, and counts who connects."""
    with listening(b"nothing", answers=True) as found:
        yield found


def config_at(address, *overrides):
    return load("digits", ["cluster.kind=address", f"cluster.address={address}", *overrides])


def test_a_command_joins_what_its_user_names(site, hostile):
    with refused("cluster.address", hostile.address):
        training_host(config_at(hostile.address), site)
    assert hostile.num_connections


def test_a_form_cannot_name_a_scheduler(as_deployment, hostile):
    with refused("cluster.address", hostile.address, "PACELINE_SCHEDULER"):
        training_host(config_at(hostile.address, "cluster.tls=off"), Environment())
    assert hostile.num_connections == 0


def test_a_form_joins_the_scheduler_of_its_host(as_deployment, monkeypatch):
    monkeypatch.setenv("PACELINE_SCHEDULER", OF_SERVER["address"])
    check_origin(Cluster(**OF_SERVER), Environment())
    with refused("cluster.address", "PACELINE_SCHEDULER=tcp://127.0.0.1:8786"):
        check_origin(Cluster(kind="address", address="tcp://127.0.0.1:1"), Environment())


@pytest.mark.parametrize(
    "cluster",
    [{"tls": "off"}, {"kind": "ssh", "hosts": ["node1"], "tls": "off"}, OF_SERVER | {"tls": "off"}],
    ids=str,
)
def test_a_form_cannot_go_without_tls_unless_its_host_does(as_deployment, monkeypatch, cluster):
    monkeypatch.setenv("PACELINE_SCHEDULER", OF_SERVER["address"])
    with refused("cluster.tls", "cluster.tls=off", "PACELINE_CLUSTER_TLS=off"):
        check_origin(Cluster(**cluster), Environment())
    monkeypatch.setenv("PACELINE_CLUSTER_TLS", "off")
    check_origin(Cluster(**cluster), Environment())


def test_what_is_served_is_allowed_for_its_own_runs(as_deployment, monkeypatch):
    monkeypatch.setenv("PACELINE_SCHEDULER", "")
    monkeypatch.setenv("PACELINE_CLUSTER_TLS", "")
    served = Cluster(**OF_SERVER, tls="off")
    allow(served)
    check_origin(served, Environment())
    check_origin(Cluster(), Environment())


@pytest.mark.parametrize("name", ["code", "co,de"])
def test_a_form_imports_only_the_code_of_its_host(as_deployment, tmp_path, monkeypatch, name):
    monkeypatch.setenv("PACELINE_CODE", "")
    tmp_path /= name
    tmp_path.mkdir()
    (tmp_path / "prose.py").touch()
    settings = {"model": {"class_path": "prose.GPT"}, "trainer": {"callbacks": [{"class_path": "acme.Callback"}]}}
    own = Lightning(settings=settings, code=str(tmp_path))
    with refused("lightning", str(tmp_path)) as refusal:
        check_code(own, Environment())
    listed = str(tmp_path).replace(",", "%2C")
    assert refusal.value.hint.endswith(f"export PACELINE_CODE={listed},acme")
    allow(Cluster(), own)
    check_code(own, Environment())
    callback = {"class_path": "lightning.pytorch.callbacks.LambdaCallback"}
    foreign = (
        {"model": {"class_path": "os.system"}},
        {"model": "mlflow.MlflowClient"},  # jsonargparse takes it for a class_path
        {"trainer": {"callbacks": [callback | {"init_args": {"on_fit_start": "mlflow.start_run"}}]}},
    )
    for change in (
        {"code": "/elsewhere"},
        {"code": f"{tmp_path},acme"},
        *({"settings": settings} for settings in foreign),
    ):
        with refused("lightning"):
            check_code(own.model_copy(update=change), Environment())
    path = tmp_path / "more.yaml"
    path.write_text("class_path: os.system")
    with refused("lightning"):
        check_code(own.model_copy(update={"settings": {"model": str(path)}}), Environment())


def test_no_axis_of_a_form_names_a_scheduler(as_deployment, hostile):
    config = load("digits")
    axes = {"cluster.kind": ["address"], "cluster.address": [hostile.address]}
    with refused("--axis", "cluster.kind"):
        check_study(StudyRequest(preset="digits", config=config, axes=axes), Environment())
    assert hostile.num_connections == 0


def stored(site, config, role, **request):
    """An unfinished run of a store that somebody else has written to; its id."""
    experiment_id = check_store(site.tracking_uri, config.track.experiment, site.artifact_root)
    with disable_run_logger(), mlflow_run.new_run(config, site, experiment_id, role) as handle:
        if request:
            document = {"preset": "digits", "config": config.model_dump(mode="json")} | request
            tracking.log_document(handle, ARTIFACTS[role], document)
    MlflowClient(site.tracking_uri).update_run(handle.run_id, status="KILLED")
    return handle.run_id


@pytest.mark.parametrize("role", ["run", "study", "sweep", "no-gpu"])
def test_a_resume_takes_no_scheduler_from_the_store(site, hostile, capsys, role):
    request = {
        "run": {},
        "study": {"axes": {"execution.precision": ["32-true", "bf16-mixed"]}},
        "sweep": {"parameters": {"recipe.learning_rate": "log(1e-3,1)"}},
        "no-gpu": {"arms": load_plan("no-gpu").model_dump()["arms"]},
    }[role]
    own = ["execution.accelerator=cpu", "model.pretrained=weights.pt"] if role == "no-gpu" else []
    run_id = stored(site, config_at(hostile.address, "cluster.tls=off", *own), role, **request)
    assert main([role, "--resume", run_id, "--json"]) == 2
    assert hostile.num_connections == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["setting"] == "--resume"
    assert "cluster.kind=local" in printed.err
    assert hostile.address not in printed.err, "nobody is to paste it"
    # The user may name any scheduler.
    named = ["cluster.kind=address", f"cluster.address={hostile.address}"]
    assert main([role, "--resume", run_id, *named, "--json"]) == 2
    assert hostile.num_connections
    assert json.loads(capsys.readouterr().out)["setting"] == "cluster.address"


def test_a_resume_says_which_settings_of_the_cluster_it_leaves(site, capsys):
    config = load("digits", ["cluster.num_workers=3", "cluster.tls=off", "limits.train_seconds=60"])
    run_id = stored(site, config, "run")
    assert main(["run", "--resume", run_id, "cluster.num_workers=2", "--show"]) == 0
    shown = capsys.readouterr()
    assert "not taken from the run: cluster.tls; give again what you need" in shown.err
    tree = yaml.safe_load(shown.out)
    assert (tree["cluster"]["num_workers"], tree["cluster"]["tls"], tree["limits"]["train_seconds"]) == (2, "auto", 60)


def test_the_store_plants_no_axes(site, hostile, capsys):
    axes = {"cluster.kind": ["address"], "cluster.address": [hostile.address]}
    run_id = stored(site, load("digits"), "study", axes=axes)
    assert main(["study", "--resume", run_id, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["setting"] == "--axis"
    check_data(printed["error"], "cluster.kind")
    assert hostile.num_connections == 0


def test_the_store_plants_no_arms(site, hostile, capsys):
    arms = load_plan("no-gpu").model_dump()["arms"]
    arms["fine-tuned"]["overrides"] += ["cluster.kind=address", f"cluster.address={hostile.address}"]
    run_id = stored(site, load("digits", ["execution.accelerator=cpu"]), "no-gpu", arms=arms)
    assert main(["no-gpu", "--resume", run_id, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["setting"] == "cluster.kind"
    assert hostile.num_connections == 0


def test_other_settings_are_not_given_with_a_resumed_study(site, capsys):
    run_id = stored(site, load("digits"), "study", axes={"execution.precision": ["32-true", "bf16-mixed"]})
    for more in (["digits"], ["recipe.num_epochs=1"], ["--repeats", "2"], ["cluster.wait_seconds=3", "seed=2"]):
        assert main(["study", "--resume", run_id, *more, "--json"]) == 2
        printed = json.loads(capsys.readouterr().out)
        assert printed["setting"] == "--resume"
        assert "cluster.*" in printed["hint"]


def test_stored_settings_that_are_not_allowed_any_more_do_not_stop_a_resume(site, capsys):
    run_id = stored(site, load("digits"), "run")
    client = MlflowClient(site.tracking_uri)
    tree = load("digits").model_dump(mode="json")
    tree["cluster"]["interface"] = "lo; touch x"
    client.log_text(run_id, yaml.safe_dump(tree), Artifact.CONFIG)
    assert main(["run", "--resume", run_id, "--show"]) == 0
    assert "not taken from the run: cluster.interface" in capsys.readouterr().err
