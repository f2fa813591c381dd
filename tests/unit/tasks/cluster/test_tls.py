import os
import subprocess
from pathlib import Path

import pytest

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.tasks.cluster.tls import choose_tls, find_certificates, is_loopback
from tests.support.refusals import refused

SCRIPT = Path(__file__).parents[4] / "infra" / "certificates"
SLURM = {"kind": "slurm", "cores_per_host": 1, "memory_per_host": "1G"}


def make(*arguments, **environment):
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, env=os.environ | environment, check=False
    )


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Certificates, as a site has them."""
    directory = tmp_path / "tls"
    assert make(directory).returncode == 0
    monkeypatch.setenv("PACELINE_TLS", str(directory))
    return directory


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({}, "own"),
        ({"kind": "local_cuda"}, "own"),
        ({"tls": "off"}, "off"),
        ({"tls": "on"}, "on"),
        ({"kind": "ssh", "hosts": ["a"]}, "on"),
        ({"kind": "ssh", "hosts": ["a"], "tls": "off"}, "off"),
        (SLURM, "on"),
        (SLURM | {"tls": "off"}, "off"),
        ({"kind": "address", "address": "tls://10.0.0.1:8786"}, "on"),
        ({"kind": "address", "address": "tcp://127.0.0.1:8786"}, "off"),
        ({"kind": "address", "address": "tcp://10.0.0.1:8786", "tls": "off"}, "off"),
    ],
)
def test_tls_is_on_beyond_this_host(settings, value):
    choice = choose_tls(Cluster(**settings))
    assert choice.value == value
    assert choice.reason


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8786", "scheduler:8786", "tcp://[2001:db8::1]:8786"])
def test_joining_without_tls_beyond_this_host_must_be_asked_for(address):
    with refused("cluster.address", address, "cluster.tls=off"):
        choose_tls(Cluster(kind="address", address=address))


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("tcp://127.0.0.1:1", True),
        ("localhost:8786", True),
        ("tls://[::1]:8786", True),
        ("tcp://128.0.0.1:8786", False),
        ("tcp://0.0.0.0:1", False),
    ],
)
def test_loopback(address, answer):
    assert is_loopback(address) == answer


def test_the_script_makes_files_for_nobody_else_and_overwrites_nothing(made):
    assert {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()} == dict.fromkeys(
        ("ca.pem", "cert.pem", "key.pem"), 0o600
    )
    before = (made / "key.pem").read_bytes()
    again = make(made)
    assert again.returncode == 2
    assert "nothing is overwritten" in again.stderr
    assert (made / "key.pem").read_bytes() == before
    assert [path.name for path in made.parent.iterdir()] == ["tls"]


def test_the_script_puts_them_where_paceline_looks(tmp_path):
    assert make(PACELINE_HOME=str(tmp_path / "home")).returncode == 0
    assert (tmp_path / "home" / "tls" / "key.pem").is_file()
    assert make(tmp_path / "other", "soon").returncode == 2
    assert not (tmp_path / "other").exists()


def test_certificates_are_found(made):
    found = find_certificates(Environment())
    assert found.key == str(made / "key.pem")
    assert found.security().require_encryption


def test_missing_certificates_name_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_TLS", str(tmp_path / "none"))
    with refused("PACELINE_TLS", tmp_path / "none", "infra/certificates"):
        find_certificates(Environment())


def test_a_key_of_another_certificate_is_refused(made, tmp_path):
    assert make(tmp_path / "other").returncode == 0
    (made / "key.pem").write_bytes((tmp_path / "other" / "key.pem").read_bytes())
    with refused("PACELINE_TLS", made, "KEY_VALUES_MISMATCH"):
        find_certificates(Environment())


def test_a_key_that_others_can_read_is_refused(made):
    (made / "key.pem").chmod(0o644)
    with refused("PACELINE_TLS", made / "key.pem", 644, 600):
        find_certificates(Environment())
