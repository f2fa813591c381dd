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


def test_the_metrics_of_a_store_are_printed_in_the_format_of_prometheus(program, environment):
    process = program("metrics", **environment)
    text, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert 'paceline_runs{experiment="nights",role="run",state="failed"} 1.0' in text
    assert 'paceline_regressions{experiment="nights"} 2.0' in text
    assert 'paceline_speedup_ratio{experiment="nights",run="faces"} 2.5' in text
    assert 'paceline_recovery_seconds{experiment="nights",run="faces"} 4.0' in text
    assert "paceline_store_up 1.0" in text
    check = [system_program("promtool"), "check", "metrics"]
    done = subprocess.run(check, input=text, capture_output=True, text=True, check=False)
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
            process.communicate(timeout=30)
