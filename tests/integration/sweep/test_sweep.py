"""Sweeps as a user runs them: real Prefect server, MLflow server, Dask workers, ranks and Optuna."""

import json
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.tasks import deadline
from paceline.tasks.cluster.client import connect, workers
from paceline.tasks.errors import StoppedError
from paceline.tasks.train.launch.coordinator import train_group
from paceline.tasks.train.launch.device_lock import DeviceLock
from tests.support.damage import damage_newest_set
from tests.support.log_lines import log_lines
from tests.support.outputs import told_by
from tests.support.patience import until
from tests.support.scratch_cluster import ScratchCluster

TINY = [
    "data.image_size=12",
    "model.width=4",
    "model.depth=1",
    "recipe.num_epochs=3",
    "recipe.warmup_epochs=0.5",
    "recipe.batch_size=64",
    "execution.precision=32-true",
]
RATES = ["--param", "recipe.learning_rate=[0.1,0.05,1e30]", "--sampler", "grid"]
"""One of them diverges."""
NO_PROBE = "speedup.baseline=none"


@pytest.fixture(scope="module")
def client(mlflow_server):
    return MlflowClient(mlflow_server.url)


@pytest.fixture(scope="module")
def sweep(paceline, mlflow_server):
    """Runs a sweep to its end; returns its JSON and what it told."""

    def to_the_end(*arguments, status=0):
        process = paceline("sweep", *arguments, "--json", MLFLOW_TRACKING_URI=mlflow_server.url)
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == status, stderr
        return (told_by("sweep", stdout) if stdout else None), stderr

    return to_the_end


def trials_of(client, run_id):
    """The runs nested in a sweep's, by the numbers of their trials."""
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'")
    return {run.data.tags.get("paceline.trial", run.info.run_name.removeprefix("trial ")): run for run in found}


def first_done(client, process, experiment):
    """Until a trial of an experiment is FINISHED; the sweep's id."""

    def found():
        known = client.get_experiment_by_name(experiment)
        condition = "attributes.status = 'FINISHED' and tags.`paceline.role` = 'trial'"
        done = client.search_runs([known.experiment_id], condition) if known else []
        return done[0].data.tags["paceline.sweep_run_id"] if done else None

    return until(found, "first trial", process=process)


@pytest.fixture(scope="module")
def swept(paceline, sweep, client, mlflow_server):
    """A sweep of three trials, two at once, that was interrupted after the first and went on."""
    arguments = ["sweep", "digits", *TINY, *RATES, "--at-once", "2", "track.experiment=swept", NO_PROBE]
    process = paceline(*arguments, MLFLOW_TRACKING_URI=mlflow_server.url)
    run_id = first_done(client, process, "swept")
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, told
    before = client.get_run(run_id), trials_of(client, run_id)
    damage_newest_set(Environment().root)
    return before, *sweep("--resume", run_id)


def test_trials_run_at_once_and_the_best_is_told(swept, client):
    _, summary, told = swept
    by_rate = {trial["values"]["recipe.learning_rate"]: trial for trial in summary["trials"]}
    assert len(by_rate) == 3
    assert {rate for rate, trial in by_rate.items() if trial["status"] == "failed"} == {1e30}
    assert "is nan" in by_rate[1e30]["error"]
    assert summary["num_failed"] == 1
    assert summary["best"]["values"]["recipe.learning_rate"] in (0.1, 0.05)
    assert summary["best"]["score"] == max(trial["score"] or 0 for trial in summary["trials"])
    assert f"`paceline run digits {summary['best']['overrides'][0]}`" in told
    parent = client.get_run(summary["run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["sweep/best_score"] == pytest.approx(summary["best"]["score"])
    assert parent.data.tags["paceline.best_run_id"] == summary["best"]["run_id"]


def test_each_trial_has_a_run_with_its_settings_and_its_curve(swept, client):
    _, summary, _ = swept
    runs = trials_of(client, summary["run_id"])
    assert len(runs) == 3
    for trial in summary["trials"]:
        run = runs[str(trial["number"])]
        assert run.info.run_id == trial["run_id"]
        assert float(run.data.params["recipe.learning_rate"]) == trial["values"]["recipe.learning_rate"]
        assert run.info.status == ("FAILED" if trial["status"] == "failed" else "FINISHED")
        if trial["status"] == "done":
            history = client.get_metric_history(run.info.run_id, "validation/accuracy")
            assert len(history) == 3
            assert max(history, key=lambda one: one.step).value == trial["score"]


def test_an_interrupted_sweep_goes_on_where_it_was(swept, client):
    (parent, before), summary, told = swept
    assert "is damaged" in told, "a resume checks the content of the prepared set"
    assert parent.info.status == "KILLED"
    assert "resume with: paceline sweep --resume" in parent.data.tags["paceline.error"]
    assert "RUNNING" not in {run.info.status for run in before.values()}
    done = {number: run for number, run in before.items() if run.info.status == "FINISHED"}
    assert done
    after = trials_of(client, summary["run_id"])
    assert {run.info.run_id for run in before.values()} <= {run.info.run_id for run in after.values()}
    for number, run in done.items():
        assert after[number].info.end_time == run.info.end_time, "what is done is not done again"


def test_trials_that_ran_at_the_same_time_shared_the_prepared_set(swept, client, tmp_path):
    _, summary, _ = swept
    result = json.loads(Path(client.download_artifacts(summary["run_id"], "sweep.json", str(tmp_path))).read_text())
    spans = [(trial["started"], trial["started"] + trial["seconds"]) for trial in result["trials"]]
    overlaps = [min(a[1], b[1]) - max(a[0], b[0]) for a in spans for b in spans if a is not b]
    assert max(overlaps) > 1.0
    digests = {
        run.inputs.dataset_inputs[0].dataset.digest
        for run in trials_of(client, summary["run_id"]).values()
        if run.inputs.dataset_inputs
    }
    assert len(digests) == 1
    page = Path(client.download_artifacts(summary["run_id"], "report.html", str(tmp_path))).read_text()
    assert "What did several at once give?" in page


@pytest.mark.slow
def test_what_several_at_once_give_is_measured(sweep, client):
    summary, told = sweep(
        *("digits", *TINY, "track.experiment=colocation", "speedup.max_seconds=3"),
        *("--param", "recipe.learning_rate=[0.1,0.05]", "--sampler", "grid", "--at-once", "2"),
    )
    speedup = summary["speedup"]
    assert speedup["ratio"] == pytest.approx(speedup["over_alone"]["value"] * summary["occupancy"])
    assert speedup["layout"] in ("one model per device", "one model on all devices", "no certain difference")
    assert speedup["over_whole"]["value"] > 0
    assert "times as fast as one trial after the other" in told
    tags = client.get_run(summary["run_id"]).data.tags
    assert tags["paceline.layout"] == speedup["layout"]


@pytest.mark.slow
def test_a_poor_trial_is_pruned(sweep, client):
    """The one that learns is the first of the grid by this seed, and the other is below it after one epoch."""
    summary, told = sweep(
        *("digits", *TINY, "recipe.num_epochs=40", "seed=1", "track.experiment=pruned", NO_PROBE),
        *("--param", "recipe.learning_rate=[0.1,1e-9]", "--sampler", "grid", "--pruner", "asha", "--at-once", "1"),
    )
    first, second = summary["trials"]
    assert first["values"]["recipe.learning_rate"] == 0.1
    assert (first["status"], second["status"]) == ("done", "pruned")
    assert second["num_epochs"] < 40
    run = trials_of(client, summary["run_id"])["1"]
    assert run.info.status == "KILLED"
    assert run.data.tags["paceline.pruned"].startswith("pruned after epoch ")
    assert run.data.metrics["sweep/score"] == second["score"]
    assert "Traceback" not in told
    assert summary["speedup"] == {
        "ratio": None,
        "low": None,
        "high": None,
        "layout": None,
        "reason": NO_PROBE,
    }


@pytest.mark.slow
def test_a_sweep_whose_trials_all_fail_fails(sweep):
    _, told = sweep(
        *("digits", *TINY, "track.experiment=failed", NO_PROBE),
        *("--param", "recipe.learning_rate=[1e30,2e30]", "--sampler", "grid"),
        status=1,
    )
    assert "all 2 trials failed" in told


@pytest.mark.slow
def test_a_training_takes_a_device_that_becomes_free_while_it_waits_for_another(make_job, cluster_address):
    """As when a lost worker comes back while its trial waits in line at another's."""
    job, lines = make_job("recipe.num_epochs=1"), []
    with connect(cluster_address) as dask:
        devices = [f"cpu {worker}" for worker in workers(dask)]
    with ExitStack() as held, log_lines(lines.append):
        leases = [DeviceLock(Environment().leases, device) for device in devices]
        for lease in leases:
            assert lease.take("another", 0)
            held.callback(lease.release)
        found = []
        thread = threading.Thread(target=lambda: found.append(train_group(job, cluster_address)))
        thread.start()
        waited = until(lambda: next((line for line in lines if line.startswith("Waiting for ")), None), "wait")
        other = next(lease for lease, device in zip(leases, devices, strict=True) if f"{device} on" not in waited)
        other.release()
        thread.join(120)
    assert found
    assert "Another device is free now; using that one" in lines


@pytest.mark.slow
def test_a_training_that_nobody_wants_any_more_is_ended(make_job, cluster_address):
    job = make_job("recipe.num_epochs=100000")
    progress = job.directory / "attempt-0" / "rank-0" / "progress.json"
    with (
        deadline.stoppable(lambda: "enough" if progress.exists() else None),
        pytest.raises(StoppedError, match="enough"),
    ):
        train_group(job, cluster_address)


@pytest.mark.slow
def test_a_killed_worker_costs_its_trial_an_epoch_and_the_others_nothing(paceline, client, mlflow_server):
    rates = ["--param", "recipe.learning_rate=[0.1,0.05]", "--sampler", "grid"]
    small = ["sweep", "digits", *TINY, *rates, "recipe.num_epochs=150", NO_PROBE, "--json"]
    with ScratchCluster(2) as cluster:
        at = ["cluster.kind=address", f"cluster.address={cluster.address}"]
        environment = {"MLFLOW_TRACKING_URI": mlflow_server.url}
        undisturbed = paceline(*small, *at, "track.experiment=calm", **environment)
        calm = json.loads(undisturbed.communicate(timeout=200)[0].splitlines()[-1])
        process = paceline(*small, *at, "track.experiment=killed", **environment)

        def under_way():
            known = client.get_experiment_by_name("killed")
            runs = client.search_runs([known.experiment_id], "tags.`paceline.role` = 'trial'") if known else []
            return len(runs) == 2 and all("validation/accuracy" in run.data.metrics for run in runs)

        until(under_way, "epoch of both trials", process=process)
        cluster.kill(cluster.worker_pid(0))
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    summary = told_by("sweep", stdout)
    assert sorted(trial["restarts"] for trial in summary["trials"]) == [0, 1]
    scores = {trial["values"]["recipe.learning_rate"]: trial["score"] for trial in summary["trials"]}
    assert scores == {trial["values"]["recipe.learning_rate"]: trial["score"] for trial in calm["trials"]}
