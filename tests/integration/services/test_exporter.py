"""`paceline metrics` next to a real MLflow store, read by Prometheus's own tools."""

import json
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
from mlflow.tracking import MlflowClient

from infra.services.home import free_port
from tests.integration.services.test_site_files import ask
from tests.support.patience import until
from tests.support.slurm import program as system_program

INFRA = Path(__file__).parents[3] / "infra"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a site with one finished and one failed run."""
    home = tmp_path_factory.mktemp("home")
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    experiment = client.create_experiment("nights", artifact_location=f"{home}/artifacts")
    for status in ("FINISHED", "FAILED"):
        tags = {"paceline.role": "run", "paceline.regression": "throughput"}
        run = client.create_run(experiment, tags=tags, run_name="faces")
        client.log_metric(run.info.run_id, "speedup/ratio", 2.5)
        client.log_metric(run.info.run_id, "recovery/seconds", 4.0)
        client.set_terminated(run.info.run_id, status)
    return {"PACELINE_HOME": str(home)}


def printed(program, **environment):
    process = program("metrics", **environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_the_metrics_of_a_store_are_printed_and_served(program, environment):
    text = printed(program, **environment)
    assert 'paceline_runs{experiment="nights",role="run",state="failed"} 1.0' in text
    assert 'paceline_regressions{experiment="nights"} 2.0' in text
    assert 'paceline_speedup_ratio{experiment="nights",run="faces"} 2.5' in text
    assert 'paceline_recovery_seconds{experiment="nights",run="faces"} 4.0' in text
    assert "paceline_store_up 1.0" in text
    port = free_port()
    serving = program("metrics", "--listen", f"127.0.0.1:{port}", **environment)
    try:
        _, served = until(
            lambda: found if (found := ask(f"http://127.0.0.1:{port}/metrics"))[0] == 200 else None, "page"
        )
    finally:
        serving.terminate()
        serving.communicate(timeout=30)
    names = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in served.splitlines() if line.startswith("#")] == names


def test_a_site_without_runs_has_a_disk_and_no_store(program, tmp_path):
    text = printed(program, PACELINE_HOME=str(tmp_path / "new"))
    assert "paceline_store_up 0.0" in text
    assert "paceline_free_bytes" in text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "192.0.2.1:9464"])
def test_an_address_that_cannot_be_listened_on_is_refused(program, address):
    process = program("metrics", "--listen", address)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"error: --listen {address} cannot be used" in err
    assert "hint: paceline metrics --listen 127.0.0.1:9464" in err


def test_promtool_accepts_them(program, environment):
    promtool = system_program("promtool")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=printed(program, **environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_prometheus_answers_every_query_of_the_dashboard(program, environment, tmp_path):
    prometheus, port, page = system_program("prometheus"), free_port(), free_port()
    config = (INFRA / "prometheus.yml").read_text().replace("127.0.0.1:9464", f"127.0.0.1:{page}")
    (tmp_path / "prometheus.yml").write_text(config.replace("interval: 60s", "interval: 1s").replace("30s", "1s"))
    place = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path}/data"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    serving = program("metrics", "--listen", f"127.0.0.1:{page}", **environment)
    asking = subprocess.Popen([prometheus, f"--config.file={tmp_path}/prometheus.yml", *place], **quiet)
    dashboard = json.loads((INFRA / "grafana.json").read_text())
    try:
        for panel in dashboard["panels"]:
            query = panel["targets"][0]["expr"].replace("$role", ".*")

            def rows(query=query):
                status, answer = ask(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}")
                return json.loads(answer)["data"]["result"] if status == 200 else None

            assert until(rows, query, seconds=60)
    finally:
        for process in (asking, serving):
            process.terminate()
            process.wait(30)
