"""The doctor examines real servers, certificates and workers, and finds what has been made wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows.checks.preflight import training_host
from paceline.flows.doctor import _cluster, _wrong
from paceline.tasks.cluster.client import connect, workers
from paceline.tasks.cluster.hardware import describe
from paceline.tasks.doctor.devices import measure_devices
from paceline.tasks.errors import InputError
from paceline.tasks.names import DOCTOR_EXPERIMENT
from paceline.tasks.track.queries import find_runs
from paceline.tasks.train.launch.device_lock import DeviceLock
from tests.support.jobs import two_workers
from tests.support.listeners import listening
from tests.support.outputs import told_by
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]


@pytest.fixture
def doctor(paceline):
    """Examines: exit status, findings by name, stderr."""

    def examine(*arguments, **environment):
        process = paceline("doctor", *arguments, "--json", **environment)
        stdout, stderr = process.communicate(timeout=120)
        findings = told_by("doctor", stdout)["findings"] if stdout else []
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
    assert found["locks"]["status"] == "ok"
    assert found["shared state"]["status"] == found["clocks"]["status"] == found["code"]["status"] == "ok"
    assert "nothing is wrong" in stderr.splitlines()[-1]


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """Two workers; a run holds the device of the first."""
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    with two_workers() as address, connect(address) as client:
        lock = DeviceLock(tmp_path / "leases", f"cpu {workers(client)[0]}")
        assert lock.take("night", 0)
        yield address
        lock.release()


@pytest.mark.slow
def test_a_device_in_use_is_not_measured(busy, tmp_path):
    measured = measure_devices(busy, Environment(), "auto")
    (device,) = measured.devices
    assert measured.skipped == {f"{device.host} cpu-0": "in use by run night"}
    assert (device.device, device.num_threads, measured.links) == ("cpu-1", max(1, describe().compute_threads // 2), ())
    assert device.rates.keys() == {"32-true", "bf16-mixed", "memory", "host_to_device", "disk"}
    assert device.rates["host_to_device"] is None
    assert device.rates["disk"] is None or device.rates["disk"] > 0
    assert list((tmp_path / "home" / "doctor").iterdir()) == []


@pytest.mark.slow
def test_devices_and_links_are_measured_and_compared_with_the_last_time(paceline, tmp_path):
    home = {"PACELINE_HOME": str(tmp_path), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    histories = []
    for _ in range(2):
        process = paceline("doctor", "--measure", "cluster.num_workers=2", "--json", **home)
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == 0, stderr
        answer = told_by("doctor", stdout)
        measured = answer["measurement"]
        histories.append({finding["check"]: finding for finding in answer["findings"]}["history"]["found"])
        assert [device["device"] for device in measured["devices"]] == ["cpu-0", "cpu-1"]
        (link,) = measured["links"]
        assert link["devices"] == [f"{device['host']} {device['device']}" for device in measured["devices"]]
        assert min(link["bytes_per_second"], *(device["rates"]["memory"] for device in measured["devices"])) > 0
        assert measured["skipped"] == {}
    assert "there is no earlier measurement" in histories[0]
    assert "compared with the last measurement" in histories[1]
    runs = find_runs(home["MLFLOW_TRACKING_URI"], DOCTOR_EXPERIMENT)
    host = measured["devices"][0]["host"]
    assert len(runs) == 2
    assert {f"device/{host}/cpu-0/32-true", f"device/{host}/cpu-1/memory"} <= runs[0].metrics.keys()


IMPATIENT = """
import sys
from paceline.flows.cli import main
from paceline.tasks.cluster import client
client.CONNECT_SECONDS = 1
sys.exit(main(sys.argv[1:]))
"""


def test_what_is_wrong_is_named_with_its_remedy_and_the_rest_is_looked_at_all_the_same(tmp_path):
    made = subprocess.run([ROOT / "infra" / "certificates", tmp_path / "tls", "5"], check=False, capture_output=True)
    assert made.returncode == 0, made.stderr
    (tmp_path / "file").touch()
    environment = os.environ | {
        "PACELINE_TLS": str(tmp_path / "tls"),
        "PACELINE_LEASES": str(tmp_path / "file" / "leases"),
        "MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:9",
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
    }
    arguments = ["doctor", "cluster.kind=address", "cluster.address=tls://127.0.0.1:1", "--json"]
    command = [sys.executable, "-c", IMPATIENT, *arguments]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    stderr = done.stderr
    assert done.returncode == 1, stderr
    found = {finding["check"]: finding for finding in told_by("doctor", done.stdout)["findings"]}
    wrong = {name for name, finding in found.items() if finding["status"] == "error"}
    assert wrong == {"leases", "mlflow", "prefect", "workers"}
    assert found["certificates"]["status"] == "warning"
    assert "expires in 5 days" in found["certificates"]["found"]
    assert all(finding["remedy"] for finding in found.values() if finding["status"] != "ok")
    assert "secret" not in stderr + json.dumps(found)


@pytest.mark.slow
def test_data_are_looked_for_where_workers_read_them(doctor, tmp_path):
    status, found, stderr = doctor("data.source=folder", f"data.root={tmp_path}")
    assert (status, found["data on workers"]["status"]) == (0, "ok"), stderr
    status, found, _ = doctor("data.source=folder", f"data.root={tmp_path / 'nowhere'}")
    assert (status, found["data on workers"]["status"]) == (1, "error")
    assert f"data.root={tmp_path / 'nowhere'}: is not there" in found["data on workers"]["found"]
    assert "data on workers" not in doctor()[1], "digits are drawn"


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
OTHERS = {
    "an HTTP server": ((HTTP, True), "in another protocol than Dask's"),
    "an SSH server": ((b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", False), "in another protocol than Dask's"),
    "silence": ((b"", False), "accepts connections there and does not answer"),
    "noise": ((bytes(range(256)) * 256, False), "in another protocol than Dask's"),
    "a long message that never comes": (((2**34).to_bytes(8, "little") + b"x", False), "there"),
    "an early end": ((b"", True), "accepts connections there and closes them"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_address_without_a_scheduler_is_told_in_bounded_time(other, monkeypatch):
    monkeypatch.setattr("paceline.tasks.cluster.client.CONNECT_SECONDS", 1)
    behaviour, told = OTHERS[other]
    with listening(*behaviour) as listener:
        config = load("digits", ["cluster.kind=address", f"cluster.address={listener.address}"])
        for look in (_cluster, training_host):  # the doctor's, and that of a run: exit status 2
            with pytest.raises(InputError) as refused:
                look(config, Environment())
            found = _wrong("workers", refused.value)
            assert f"cluster.address={listener.address}: no Dask scheduler answers within 1 s" in found.found
            assert told in found.found
            assert "start it, or correct host and port, which `dask scheduler` prints at its start" in found.remedy
        assert listener.num_connections


def test_a_worker_is_no_scheduler():
    with two_workers(tls="off") as address, Client(address, set_as_default=False) as client:
        worker = next(iter(client.scheduler_info()["workers"]))
        with refused("cluster.address", f"cluster.address={worker}"), connect(worker):
            pass


@pytest.mark.slow
def test_the_doctor_and_a_run_end_where_nothing_answers(doctor, paceline):
    with listening() as silent:
        there = ["cluster.kind=address", f"cluster.address={silent.address}"]
        status, found, _ = doctor(*there)
        assert (status, found["workers"]["status"]) == (1, "error")
        run = paceline("run", "digits", *there)
        _, stderr = run.communicate(timeout=60)
        assert run.returncode == 2, stderr
        assert "accepts connections there and does not answer" in stderr


@pytest.mark.slow
def test_a_worker_with_other_code_is_found(doctor):
    with two_workers(tls="off") as address, Client(address, set_as_default=False) as client:
        client.run(_pretend_other_code)
        status, found, _ = doctor("cluster.kind=address", f"cluster.address={address}")
    assert status == 1
    assert "2 workers run other code" in found["code"]["found"]


def _pretend_other_code():
    from paceline.tasks.doctor import workers

    workers.code_fingerprint = lambda: "0123456789ab"
