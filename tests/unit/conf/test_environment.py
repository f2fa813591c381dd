import os
from pathlib import Path
from urllib.request import proxy_bypass

import pytest
import yaml

from paceline.conf.environment import QUIET_ENVIRONMENT, Environment, quieten, spare_loopback
from paceline.conf.load import PRESETS


def test_state_lies_in_the_working_directory_unless_told(monkeypatch, tmp_path):
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setenv("HOME", "/nowhere")  # a field called home must not read it
    monkeypatch.chdir(tmp_path)
    site = Environment()
    assert site.root == tmp_path / ".paceline"
    assert site.tracking_uri == f"sqlite:///{tmp_path}/.paceline/mlflow.db"
    assert site.artifact_root == (tmp_path / ".paceline/mlartifacts").as_uri()
    assert site.tls_directory == tmp_path / ".paceline/tls"
    assert site.cache_directory == tmp_path / ".paceline/cache"


def test_the_environment_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setenv("PACELINE_TLS", "/etc/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "/var/cache")
    site = Environment()
    assert site.tls_directory == Path("/etc/paceline")
    assert site.cache_directory == Path("/var/cache")
    assert site.root == Path(tmp_path)
    assert site.tracking_uri == "http://127.0.0.1:5000"
    assert site.artifact_root is None
    assert site.prefect_api_url == "http://127.0.0.1:4200/api"


def test_telemetry_is_off_unless_the_user_says_otherwise(monkeypatch):
    for name in QUIET_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "true")
    quieten()
    assert os.environ["DO_NOT_TRACK"] == os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"


def test_what_workers_beside_a_store_are_told_is_something_that_is_listened_to():
    told = yaml.safe_load((PRESETS.parent / "dask" / "beside_store.yaml").read_text())["distributed"]["nanny"][
        "environ"
    ]
    known = {field.validation_alias for field in Environment.model_fields.values()}
    assert {name for name in told if name.startswith("PACELINE_")} <= known
    assert not any(word in name for name in told for word in ("KEY", "SECRET", "TOKEN"))


@pytest.mark.parametrize(
    ("known", "spared"),
    [("", "127.0.0.1,localhost"), ("intra.net, localhost", "intra.net,localhost,127.0.0.1"), ("*", "*")],
)
def test_what_a_host_asks_itself_goes_by_no_proxy(known, spared, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", known)
    spare_loopback()
    assert os.environ["no_proxy"] == known, "there is no proxy"
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", known)
    spare_loopback()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == spared
    if known != "*":
        assert proxy_bypass("127.0.0.1:4200")
        assert not proxy_bypass("elsewhere.net")
