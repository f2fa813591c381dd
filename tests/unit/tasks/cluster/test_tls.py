import logging
import os
import ssl
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from paceline.conf.cluster import Cluster
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows import doctor
from paceline.flows.checks import preflight
from paceline.tasks.cluster import tls
from paceline.tasks.cluster.tls import choose_tls, days_left, find_certificates, is_loopback
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
    modes = {str(path.relative_to(made)): path.stat().st_mode & 0o777 for path in made.rglob("*.pem")}
    assert modes == dict.fromkeys(("ca.pem", "cert.pem", "key.pem", "next/cert.pem", "next/key.pem"), 0o600)
    assert (made / "next").stat().st_mode & 0o777 == 0o700
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


def contexts(directory, monkeypatch):
    """How a part of Dask that starts now listens and connects."""
    monkeypatch.setenv("PACELINE_TLS", str(directory))
    security = find_certificates(Environment()).security()
    return security.get_listen_args("worker")["ssl_context"], security.get_connection_args("worker")["ssl_context"]


def accept(one, other):
    """Whether two parts accept each other, whichever of them connects."""
    for listening, connecting in ((one[0], other[1]), (other[0], one[1])):
        here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = listening.wrap_bio(here, there, server_side=True)
        client = connecting.wrap_bio(there, here)
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        for part in (server, client, server):
            try:
                part.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
        client.write(b"x")
        assert server.read(1) == b"x"
    return True


def test_certificates_that_end_tomorrow_are_renewed_while_all_parts_run(tmp_path, monkeypatch, caplog):
    directory = tmp_path / "tls"
    assert make(directory, 1).returncode == 0
    before = contexts(directory, monkeypatch)
    config = load("digits", ["cluster.tls=on"])
    with caplog.at_level(logging.WARNING, logger="paceline"):
        preflight.training_host(config, Environment())
    assert f"expires in 1 day; renew it: infra/certificates --renew {directory}" in caplog.text
    assert make("--renew", directory).returncode == 0
    caplog.clear()
    after = contexts(directory, monkeypatch)
    assert days_left(find_certificates(Environment())) > 1.9
    assert accept(before, before)
    assert accept(before, after), "a part that was not restarted yet, and one that was"
    assert accept(after, after)
    assert make("--renew", directory).returncode == 0
    third = contexts(directory, monkeypatch)
    assert accept(after, third)
    assert not accept(before, third), "two renewals without a restart in between"
    preflight.training_host(config, Environment())
    assert caplog.text == ""
    content = {path: path.read_bytes() for path in directory.rglob("*.pem")}
    assert "nothing was changed" in make("--renew", directory).stdout
    assert {path: path.read_bytes() for path in directory.rglob("*.pem")} == content


def test_certificates_of_an_older_paceline_are_renewed_in_two_steps(tmp_path, monkeypatch):
    directory = tmp_path / "tls"
    assert make(directory, 1).returncode == 0
    rmtree(directory / "next")
    old = contexts(directory, monkeypatch)
    told = make("--renew", directory)
    assert f"call infra/certificates --renew {directory} again" in told.stdout, told.stderr
    restarted = contexts(directory, monkeypatch)
    assert accept(old, restarted)
    assert make("--renew", directory).returncode == 0
    assert accept(restarted, contexts(directory, monkeypatch))


@pytest.mark.parametrize("cut", ["key.pem", "cert.pem", "next"])
def test_a_renewal_that_was_killed_is_completed_by_the_next_one(made, tmp_path, monkeypatch, cut):
    rmtree(made)
    assert make(made, 1).returncode == 0
    before, at_first = contexts(made, monkeypatch), copytree(made, tmp_path / "first")
    assert make("--renew", made).returncode == 0
    for name in ("next", "cert.pem", "key.pem"):  # as they are replaced, last first
        if name == "next":
            rmtree(made / name)
            copytree(at_first / name, made / name)
        else:
            (made / name).write_bytes((at_first / name).read_bytes())
        if name == cut:
            break
    assert make("--renew", made).returncode == 0
    assert accept(before, contexts(made, monkeypatch))


def issue(directory, ended):
    """Write the files of a site whose certificate, its own authority, has ended some days ago."""
    key, end = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) - timedelta(days=ended)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paceline")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, end - timedelta(days=366), end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for name, content in zip(tls.FILES, (certificate, certificate, key.private_bytes(*form)), strict=True):
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("arguments", [["cluster.tls=on"], ["cluster.kind=ssh", "cluster.hosts=[127.0.0.1]"]])
def test_an_expired_certificate_is_refused_with_the_command_that_renews_it(made, arguments):
    issue(made, ended=3)
    with refused("PACELINE_TLS", made, 3) as caught:
        preflight.training_host(load("digits", arguments), Environment())
    assert caught.value.hint == f"infra/certificates --renew {made}"
    assert make("--renew", made).returncode == 0
    assert days_left(find_certificates(Environment())) > 700


@pytest.mark.parametrize(
    ("days", "text"),
    [(5.2, "expires in 5 days"), (1.1, "expires in 1 day"), (0.3, "expires in less than a day"),
     (-0.3, "expired less than a day ago"), (-1.1, "expired 1 day ago"), (-3.0, "expired 3 days ago")],
)  # fmt: skip
def test_days_to_an_expiry_are_in_words(days, text):
    assert tls.expiry_text(days) == text


def test_an_expired_certificate_of_the_proxy_is_said_to_have_expired(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PACELINE_TLS", str(tmp_path / "tls"))
    path = tmp_path / "proxy" / "cert.pem"
    path.parent.mkdir()
    issue(path.parent, ended=3)
    (finding,) = doctor._proxy(Environment())
    assert (finding.status, finding.found) == ("warning", f"{path} expired 3 days ago")
    with caplog.at_level(logging.WARNING, logger="paceline"):
        preflight.training_host(load("digits"), Environment())
    assert f"the certificate in {path} expired 3 days ago; replace {path}" in caplog.text
