"""The program as a user runs it: real Prefect server, Dask cluster, MLflow store and rank processes."""

import io
import json
import os
import re
import signal
import time
import uuid
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from mlflow.tracking import MlflowClient

from paceline.conf.environment import Environment
from paceline.flows.commands.evidence import find_evidence
from paceline.tasks.speedup.evidence.archive import unpack
from paceline.tasks.speedup.evidence.recompute import differences, recompute
from paceline.tasks.train.launch.rank_process import running_ranks
from tests.support.outputs import told_by
from tests.support.own_lightning import PACKAGE
from tests.support.patience import until

QUICK = [
    "data.image_size=16",
    "model.width=4",
    "model.depth=1",
    "recipe.num_epochs=2",
    "recipe.warmup_epochs=0.5",
    "speedup.max_seconds=3",
]
FIXED = ["precision=32-true", "memory_format=contiguous", "loading=resident", "num_threads=1", "compile=off"]
"""Nothing of the execution left open: so long a training would first search for minutes."""
ENDLESS = [
    *QUICK,
    *(f"execution.{setting}" for setting in FIXED),
    "speedup.baseline=none",
    "recipe.num_epochs=100000",
    "recipe.schedule=constant",
]
SUMMARY = {
    "run_id experiment tracking_uri workload dataset train evaluate speedup time_budget seconds view",
    "dataset: fingerprint num_train num_validation num_test num_rejected reused seconds",
    "train: world_size num_epochs num_steps seconds samples_per_second final_loss checkpoint resumed_from",
    "train: flops_per_second bytes_per_second mfu cost limit why_no_share",
    "evaluate: accuracy samples_per_second",
    "speedup: ratio low high num_blocks significant efficiency verdict baseline of_limit of_bandwidth bound",
    "speedup: bottleneck factors",
}
METRICS = {
    "speedup/ratio",
    "speedup/low",
    "speedup/high",
    "speedup/efficiency",
    "speedup/of_limit",
    "throughput/samples_per_second",
    "throughput/flops_per_second",
    "time/data_wait_seconds",
    "time/data_wait_fraction",
    "test/accuracy",
    "train/loss",
    "validation/accuracy",
    "system/cpu_utilization_percentage",
}
ARTIFACTS = {"report.html", "summary.json", "config.yaml", "environment.json", "pictures", "model", "logs"}
ARTIFACTS |= {"evidence.tar", "steps.parquet", "windows.parquet"}
PICTURES = {"speedup.png", "training.png", "time_budget.png", "confusion.png"}


class Finished:
    """A run of the program that has ended."""

    def __init__(self, process, mark):
        self.stdout, self.stderr = process.communicate(timeout=240)
        self.status = process.returncode
        self.left = [p for p in psutil.process_iter() if p.pid != process.pid and has_mark(p, mark)]

    @property
    def summary(self):
        return told_by("run", self.stdout)


def has_mark(process, mark):
    try:
        return process.environ().get("PACELINE_TEST_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture
def start(paceline):
    """Starts a command; returns the process and a function that waits for its end."""

    def begin(*arguments, start_new_session=False, mark=None, **environment):
        mark = mark or uuid.uuid4().hex
        process = paceline(*arguments, start_new_session=start_new_session, PACELINE_TEST_RUN=mark, **environment)
        return process, lambda: Finished(process, mark)

    return begin


@pytest.fixture
def run(start):
    def to_the_end(*arguments, **environment):
        _, end = start("run", *arguments, **environment)
        finished = end()
        assert finished.left == [], "processes are left behind"
        return finished

    return to_the_end


def mlflow_run(run_id):
    return MlflowClient(Environment().tracking_uri).get_run(run_id)


def unfinished_run():
    client = MlflowClient(Environment().tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name("paceline").experiment_id], max_results=1)
    return runs[0]


def prefect_runs(url, name):
    body = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC"}
    return httpx.post(f"{url}/flow_runs/filter", json=body).json()


def test_a_run_keeps_every_promise_of_the_contract(run, prefect_url):
    first = run("digits", *QUICK, "name=contract", "speedup.factors=ladder", "--json")
    assert first.status == 0, first.stderr
    assert len(first.stdout.splitlines()) == 1
    summary = first.summary
    for line in SUMMARY:
        section, _, names = line.rpartition(":")
        assert set(names.split()) <= set(summary[section] if section else summary), line
    assert summary["train"]["num_steps"] == 20
    assert summary["dataset"] | {"num_train": 1293, "num_validation": 145, "num_test": 359} == summary["dataset"]
    assert summary["speedup"]["low"] <= summary["speedup"]["ratio"] <= summary["speedup"]["high"]
    assert summary["speedup"]["efficiency"] is None, "one device has no parallel efficiency to measure"
    check_factors(summary["speedup"]["factors"]["factors"], mlflow_run(summary["run_id"]).data.metrics)
    budget = sum(summary["time_budget"].values())
    assert budget == pytest.approx(summary["train"]["wall_seconds"], rel=0.02)
    check_mlflow(summary)
    check_evidence(summary)
    check_prefect(prefect_url, "contract")

    again = run("digits", *QUICK, "name=contract", f"speedup.baseline={summary['run_id']}", "--json").summary
    assert again["dataset"]["reused"] is True
    assert summary["workload"] == again["workload"]
    assert again["train"]["final_loss"] == summary["train"]["final_loss"]
    assert again["evaluate"]["confusion"] == summary["evaluate"]["confusion"]
    check_divided(again, summary["run_id"], "too few runs")


def check_factors(factors, metrics):
    """Every factor in which this run differs from the baseline was measured."""
    measured = {one["factor"]: one["ratio"] for one in factors if one["basis"] != "unchanged"}
    assert "loading" in measured
    assert measured == {name: pytest.approx(metrics[f"speedup/factor_{name}"]) for name in measured}


def check_divided(summary, base, cause):
    """By another run, unless somebody disturbed one of them, which is then told in place of the ratio."""
    speedup, metrics = summary["speedup"], mlflow_run(summary["run_id"]).data.metrics
    if speedup["ratio"] is None:
        assert re.search(r"^not divided: .*(busy with other|disturbed)", speedup["verdict"])
        return
    rate = "throughput/steady_samples_per_second"
    assert speedup["ratio"] == pytest.approx(metrics[rate] / mlflow_run(base).data.metrics[rate])
    assert metrics["speedup/ratio"] == pytest.approx(speedup["ratio"])
    assert (speedup["low"], speedup["high"], speedup["num_blocks"], speedup["cause"]) == (None, None, 0, cause)
    assert speedup["baseline_runs"] == [base]
    assert mlflow_run(summary["run_id"]).data.tags["paceline.baseline_run_id"] == base
    assert "throughput/baseline_samples_per_second" not in metrics, "by which this machine would be judged"


@pytest.mark.slow
def test_a_run_is_divided_by_those_that_did_the_same_work_as_the_baseline_does(run):
    work = ["digits", *QUICK, "recipe.num_epochs=6", "track.experiment=matched", "--json"]
    alone = run(*work, "speedup.baseline=matched").summary["speedup"]
    assert alone["ratio"] is None
    assert alone["cause"] == "not divided"
    asked = re.search(r"add (.*) for one$", alone["verdict"]).group(1).split()
    base = run(*work, *asked).summary
    check_divided(run(*work, "speedup.baseline=matched").summary, base["run_id"], "too few runs")
    other = run(*work, "recipe.learning_rate=0.01", f"speedup.baseline={base['run_id']}").summary["speedup"]
    assert other["ratio"] is None
    assert "did other work: recipe.learning_rate" in other["verdict"]


def check_mlflow(summary):
    found = mlflow_run(summary["run_id"])
    assert found.info.status == "FINISHED"
    assert METRICS - {"speedup/efficiency"} <= set(found.data.metrics)
    assert found.data.metrics["speedup/ratio"] == pytest.approx(summary["speedup"]["ratio"])
    assert found.data.tags["paceline.workload"] == summary["workload"]
    assert found.data.tags["paceline.role"] == "run"
    assert found.data.tags["prefect.flow_run_id"]
    assert found.data.params["recipe.learning_rate"] == "0.1"
    assert found.inputs.dataset_inputs[0].dataset.digest == summary["dataset"]["fingerprint"]
    client = MlflowClient(Environment().tracking_uri)
    assert {file.path for file in client.list_artifacts(summary["run_id"])} >= ARTIFACTS
    assert {Path(file.path).name for file in client.list_artifacts(summary["run_id"], "pictures")} >= PICTURES
    report = Path(client.download_artifacts(summary["run_id"], "report.html")).read_text()
    outside = re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:|#)[^\"']+|url\((?!['\"]?(?:data:|#))[^)]+", report)
    assert outside == [], "the report must open offline"
    environment = json.loads(Path(client.download_artifacts(summary["run_id"], "environment.json")).read_text())
    assert environment["versions"]["torch"].startswith("2.13")
    assert len(environment["hosts"]) == len(environment["devices"]) == 1


def check_evidence(summary):
    """Of a disturbed machine too, though `paceline evidence` would refuse that."""
    content = find_evidence(Environment(), summary["run_id"])
    (Environment().root / "runs" / summary["run_id"] / "evidence.tar").unlink()
    assert find_evidence(Environment(), summary["run_id"]) == content, "MLflow alone has it too"
    assert len(content) < 250_000
    files = unpack(content, "evidence")
    facts, printed = json.loads(files["evidence.json"]), json.loads(files["summary.json"])
    figures = recompute(dict(np.load(io.BytesIO(files["steps.npz"]))), facts)
    assert differences(figures, printed["figures"]) == []
    assert figures["speedup.ratio"] == pytest.approx(summary["speedup"]["ratio"], rel=1e-9)
    assert figures["train.samples_per_second"] == pytest.approx(summary["train"]["samples_per_second"], rel=1e-9)
    assert facts["contaminated"] in (summary["speedup"]["contaminated"], True)
    tags = mlflow_run(summary["run_id"]).data.tags
    assert tags["paceline.analysis_plan"] == facts["analysis_plan"]
    assert summary["speedup"]["verdict"] in dict(printed["rows"]).values()


def check_prefect(url, name):
    flow_run = prefect_runs(url, name)[0]
    assert flow_run["state"]["type"] == "COMPLETED"
    assert flow_run["parameters"]["config"]["recipe"]["num_epochs"] == 2
    body = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    tasks = httpx.post(f"{url}/task_runs/filter", json=body).json()
    assert {task["name"].rpartition("-")[0] for task in tasks} == {"prepare", "train", "evaluate", "account"}
    artifacts = httpx.post(f"{url}/artifacts/filter", json=body).json()
    assert any("accuracy" in artifact["data"] for artifact in artifacts if artifact["key"] == "summary")
    logs = httpx.post(f"{url}/logs/filter", json={"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}}).json()
    assert any("execution.precision=" in log["message"] for log in logs)


def test_the_flow_shows_a_form_of_every_field():
    from paceline.flows.run.flow import run_pipeline

    schema = run_pipeline.parameters.model_dump()
    sections = schema["definitions"]
    assert "batch_size" in sections["Recipe"]["properties"]
    for section in ("Data", "Model", "Recipe", "Execution", "Cluster", "Speedup", "Track"):
        for name, field in sections[section]["properties"].items():
            assert field.get("description"), f"{section}.{name} has no help"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_killed_in_mlflow_and_can_be_resumed(start, run, number, prefect_url):
    name = f"interrupted-{number.name.lower()}"
    settings = [*ENDLESS, "execution.checkpoint_steps=4", f"name={name}"]
    process, end = start("run", "digits", *settings, start_new_session=True)
    wait_for_checkpoint(process)
    (rank,) = running_ranks(unfinished_run().info.run_id)
    assert "paceline.tasks.train.launch.fork_server" in psutil.Process(rank).cmdline(), "it was not forked"
    os.killpg(process.pid, number)  # a terminal's Ctrl-C goes to the whole group
    finished = end()
    assert finished.status == 128 + number, finished.stderr
    assert finished.left == [], "processes are left behind"
    left = unfinished_run()
    assert left.info.status == "KILLED"
    assert f"--resume {left.info.run_id}" in left.data.tags["paceline.error"]
    assert prefect_runs(prefect_url, name)[0]["state"]["type"] in ("CRASHED", "CANCELLED", "FAILED")

    told = run("--resume", left.info.run_id, "recipe.num_epochs=2").stderr
    assert "would change what the run is" in told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_goes_on_to_its_end_under_its_own_id(start, run, number):
    long = [*QUICK, "recipe.num_epochs=60", "speedup.baseline=none", "execution.checkpoint_steps=4"]
    process, end = start("run", "digits", *long)
    wait_for_checkpoint(process)
    process.send_signal(number)
    finished = end()
    psutil.wait_procs(finished.left, timeout=60)
    assert not [orphan for orphan in finished.left if orphan.is_running()]
    left = unfinished_run()
    assert left.info.status == "KILLED"
    MlflowClient(Environment().tracking_uri).set_tag(left.info.run_id, "paceline.versions", "torch 1.0.0")
    (shard,) = Environment().root.glob("prepared/[!.]*/train/00000.images.npy")  # not the one set aside before
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)  # as after a power loss, or by a disk that forgets
    resumed = run("--resume", left.info.run_id, "--json")
    assert resumed.status == 0, resumed.stderr
    assert "torch 1.0.0 -> python" in resumed.stderr
    assert "train/00000.images.npy has sha256" in resumed.stderr
    assert resumed.summary["regression"]["verdict"] == "not comparable"
    assert resumed.summary["run_id"] == left.info.run_id
    assert resumed.summary["train"]["resumed_from"]
    assert resumed.summary["train"]["num_steps"] == 600
    assert mlflow_run(left.info.run_id).info.status == "FINISHED"
    steps = [
        m.step for m in MlflowClient(Environment().tracking_uri).get_metric_history(left.info.run_id, "train/loss")
    ]
    assert steps == sorted(set(steps)), "no step is logged twice"
    assert run("--resume", left.info.run_id).status == 2, "a finished run is not resumed"


def has_imports(mark):
    """Whether a process imports what ranks need."""
    names = {"paceline.tasks.train.launch.standby", "paceline.tasks.train.launch.fork_server"}
    return any(has_mark(process, mark) and names.intersection(process.cmdline()) for process in psutil.process_iter())


def has_cluster(mark):
    return any(has_mark(process, mark) and "spawn_main" in str(process.cmdline()) for process in psutil.process_iter())


def interrupt(start, tmp_path, has_started, number, *words):
    """Send a signal to a command while it starts: with the temporary API and a new home, so that nothing is ready."""
    mark = uuid.uuid4().hex
    environment = {"PREFECT_API_URL": "", "PACELINE_HOME": str(tmp_path / "home")}
    process, end = start(*words, start_new_session=True, mark=mark, **environment)
    until(lambda: has_started(mark) or process.poll() is not None, "start", seconds=60, every=0.05)
    os.killpg(process.pid, number)
    finished = end()
    assert finished.status == 128 + number, finished.stderr
    assert finished.left == [], "processes are left behind"


@pytest.mark.parametrize(
    ("number", "has_started"),
    [
        (signal.SIGINT, has_imports),
        pytest.param(signal.SIGINT, has_cluster, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, has_imports, marks=pytest.mark.slow),
        (signal.SIGTERM, has_cluster),
    ],
)
def test_a_run_that_is_interrupted_while_it_starts_leaves_no_process(start, tmp_path, has_started, number):
    interrupt(start, tmp_path, has_started, number, "run", "digits", *ENDLESS)


OWN = ("run", str(PACKAGE / "config.yaml"), "--code", str(PACKAGE))
"""Own Lightning code, whose cluster starts while it is imported."""


@pytest.mark.slow
@pytest.mark.parametrize("has_started", [has_cluster, has_imports])
def test_own_code_that_is_interrupted_while_it_is_imported_leaves_no_process(start, tmp_path, has_started):
    interrupt(start, tmp_path, has_started, signal.SIGINT, *OWN, f"data.init_args.directory={tmp_path}")


@pytest.mark.slow
def test_own_code_with_a_wrong_setting_leaves_no_process(start):
    _, end = start(*OWN, "model.init_args.widht=8")
    finished = end()
    assert finished.status == 2
    assert "widht" in finished.stderr
    assert finished.left == [], "processes are left behind"


@pytest.mark.slow
@pytest.mark.parametrize("has_started", [has_cluster, has_imports])
def test_a_run_that_is_killed_while_it_starts_leaves_no_process(start, tmp_path, has_started):
    mark = uuid.uuid4().hex
    environment = {"PREFECT_API_URL": "", "PACELINE_HOME": str(tmp_path / "home")}
    process, end = start("run", "digits", *ENDLESS, mark=mark, **environment)
    until(lambda: has_started(mark), "start", seconds=60, every=0.05)
    process.kill()
    _, alive = psutil.wait_procs(end().left, timeout=60)
    assert alive == []


def wait_for_checkpoint(process):
    """Until the newest run has saved one."""
    begun = time.time()
    until(
        lambda: [path for path in Environment().root.glob("runs/*/checkpoints/*.ckpt") if path.stat().st_mtime > begun],
        "checkpoint",
        process=process,
    )


def test_a_run_whose_rank_raises_ends_with_its_traceback(run, prefect_url):
    finished = run("digits", *QUICK, "speedup.baseline=none", "recipe.learning_rate=1e30", "name=diverges", "--json")
    assert finished.status == 1
    assert json.loads(finished.stdout)["error"].startswith("rank 0 failed: RunError: train/loss is nan at step")
    lines = finished.stderr.strip().splitlines()
    assert any(line.startswith("error: rank 0 failed: RunError: train/loss is nan") for line in lines)
    assert unfinished_run().info.status == "FAILED"
    assert prefect_runs(prefect_url, "diverges")[0]["state"]["type"] == "FAILED"


def test_without_any_server_prefects_temporary_one_is_used(run, tmp_path):
    """Nor anything of Prefect's: an account's home may not be there yet."""
    home = tmp_path / "not" / "there" / "yet"
    nothing = {"PREFECT_API_URL": "", "PREFECT_HOME": str(home)}
    finished = run("digits", *QUICK, "speedup.baseline=none", "recipe.num_epochs=1", **nothing)
    assert finished.status == 0, finished.stderr
    assert list(home.glob("*.db"))
    assert "paceline ui" in finished.stderr


def test_without_a_place_for_prefects_database_nothing_is_started(run):
    finished = run("digits", PREFECT_API_URL="", PREFECT_HOME="/proc/nothing/prefect")
    assert finished.status == 2
    assert "PREFECT_HOME=/proc/nothing/prefect cannot be made" in finished.stderr
    assert "set it to a directory of yours" in finished.stderr
