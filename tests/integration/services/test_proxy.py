"""The proxy of `infra/up --domain`: its certificate is watched, and read again while it serves."""

import logging
import signal
import ssl
import subprocess

import pytest

from infra.services.daemon import Daemon
from infra.services.home import USUAL_PORTS, Home, Settings, free_port
from infra.services.site import Site
from infra.services.start import start
from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.flows import doctor
from paceline.flows.checks import preflight
from paceline.tasks.errors import InputError
from tests.support.patience import until
from tests.support.services import passable_directory
from tests.support.slurm import program


def make_certificate(directory, days):
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", days]
    made += ["-subj", "/CN=x", "-keyout", directory / "key.pem", "-out", directory / "cert.pem"]
    subprocess.run(list(map(str, made)), check=True, capture_output=True)
    return (directory / "cert.pem").read_text()


@pytest.fixture
def site(monkeypatch):
    """A site with a domain, of which nothing runs."""
    with passable_directory() as place:
        monkeypatch.setenv("PACELINE_HOME", str(place))
        home = Home(place / "services")
        made = Site(home, Settings(ports={name: free_port() for name in USUAL_PORTS}, domain="example.com"), place)
        home.make()
        for name in ("proxy", *made["proxy"].writes):
            home.make_private(name)
        yield made


def test_a_proxy_that_is_not_installed_is_named(site, monkeypatch):
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setattr("infra.services.site.SYSTEM_FOLDERS", ())
    with pytest.raises(InputError, match=r"nginx is not installed; .* apt-get install nginx"):
        start(site, site["proxy"], print)
    assert Daemon("proxy", site.home).pid() is None


# The services are not children of this process alone: infra/up ends before them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_proxy_reads_a_renewed_certificate_while_it_serves(site):
    program("nginx")
    place, said = ("127.0.0.1", site.settings.ports["proxy"]), []

    def presents(certificate):
        try:
            return ssl.get_server_certificate(place, timeout=10) == certificate
        except OSError:
            return False

    first = make_certificate(site.home.root / "proxy", 5)
    daemon = Daemon("proxy", site.home)
    try:
        start(site, site["proxy"], said.append)
        until(lambda: presents(first), "first certificate")
        pid = daemon.pid()
        second = make_certificate(site.home.root / "proxy", 365)
        start(site, site["proxy"], said.append)
        until(lambda: presents(second), "second certificate")
        assert daemon.pid() == pid
        assert said[-1] == f"proxy runs already (process {pid})"
    finally:
        daemon.end(signal.SIGTERM, 20)


@pytest.mark.parametrize(("days", "status"), [(5, "warning"), (365, "ok")])
def test_a_certificate_of_the_proxy_that_ends_soon_is_named(site, caplog, days, status):
    path = site.home.root / "proxy" / "cert.pem"
    make_certificate(path.parent, days)
    (finding,) = doctor._proxy(Environment())
    assert (finding.status, finding.found) == (status, f"{path} expires in {days} days")
    with caplog.at_level(logging.WARNING, logger="paceline"):
        preflight.training_host(load("digits"), Environment())
    warning = (
        f"the certificate in {path} expires in {days} days; replace {path} and key.pem next to it, then call infra/up"
    )
    assert (warning in caplog.text) == (status == "warning")


def test_a_site_without_a_proxy_has_no_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert doctor._proxy(Environment()) == []
