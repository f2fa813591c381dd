"""The doctor examines real servers, certificates and workers, and finds what has been made wrong."""

import json
import subprocess
from pathlib import Path

import pytest
from distributed import Client

from tests.jobs import two_workers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def doctor(paceline):
    """Examines: exit status, findings by name, stderr."""

    def examine(*arguments, **environment):
        process = paceline("doctor", *arguments, "--json", **environment)
        stdout, stderr = process.communicate(timeout=120)
        findings = json.loads(stdout.splitlines()[-1])["findings"] if stdout else []
        return process.returncode, {finding["check"]: finding for finding in findings}, stderr

    return examine


def test_a_healthy_site(doctor, mlflow_server):
    status, found, stderr = doctor("execution.num_devices=2", MLFLOW_TRACKING_URI=mlflow_server.url)
    assert status == 0, stderr
    assert not [finding for finding in found.values() if finding["status"] == "error"]
    assert found["packages"]["found"].endswith("requirements met")
    assert "cores of" in found["devices"]["found"]
    assert found["mlflow"]["status"] == found["prefect"]["status"] == "ok", "client and server are of one version"
    assert found["workers"]["found"].startswith("2 on 1 hosts")
    assert found["shared state"]["status"] == found["clocks"]["status"] == found["code"]["status"] == "ok"
    assert "nothing wrong" in stderr.splitlines()[-1]


def test_what_is_wrong_is_named_with_its_remedy_and_the_rest_is_looked_at_all_the_same(doctor, tmp_path):
    made = subprocess.run([ROOT / "infra" / "certificates", tmp_path / "tls", "5"], check=False, capture_output=True)
    assert made.returncode == 0, made.stderr
    (tmp_path / "file").touch()
    status, found, stderr = doctor(
        "cluster.kind=address",
        "cluster.address=tls://127.0.0.1:1",
        PACELINE_TLS=str(tmp_path / "tls"),
        PACELINE_LEASES=str(tmp_path / "file" / "leases"),
        MLFLOW_TRACKING_URI="http://user:secret@127.0.0.1:9",
        PREFECT_API_URL="http://127.0.0.1:9/api",
    )
    assert status == 1, stderr
    wrong = {name for name, finding in found.items() if finding["status"] == "error"}
    assert wrong == {"leases", "mlflow", "prefect", "workers"}
    assert found["certificates"]["status"] == "warning"
    assert "valid for 5 days" in found["certificates"]["found"]
    assert all(finding["remedy"] for finding in found.values() if finding["status"] != "ok")
    assert "secret" not in stderr + json.dumps(found)


def test_data_are_looked_for_where_workers_read_them(doctor, tmp_path):
    status, found, stderr = doctor("data.source=folder", f"data.root={tmp_path}")
    assert (status, found["data on workers"]["status"]) == (0, "ok"), stderr
    status, found, _ = doctor("data.source=folder", f"data.root={tmp_path / 'nowhere'}")
    assert (status, found["data on workers"]["status"]) == (1, "error")
    assert f"data.root={tmp_path / 'nowhere'}: is not there" in found["data on workers"]["found"]
    assert "data on workers" not in doctor()[1], "digits are drawn"


def test_a_worker_with_other_code_is_found(doctor):
    with two_workers(tls="off") as address, Client(address, set_as_default=False) as client:
        client.run(_pretend_other_code)
        status, found, _ = doctor("cluster.kind=address", f"cluster.address={address}")
    assert status == 1
    assert "2 workers run other code" in found["code"]["found"]


def _pretend_other_code():
    from tasks.doctor import workers

    workers.code_fingerprint = lambda: "0123456789ab"
