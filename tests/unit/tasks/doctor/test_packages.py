"""What is wrong with installed packages, planted."""

import pytest

from paceline.tasks.doctor import packages


@pytest.fixture
def pretend(monkeypatch):
    """Makes packages appear in other versions."""
    real = packages.installed_version

    def versions(**others):
        monkeypatch.setattr(packages, "installed_version", lambda name: others.get(name.replace("-", "_"), real(name)))

    return versions


def by_check():
    return {finding.check: finding for finding in packages.examine_packages()}


def test_this_environment_is_healthy():
    assert {finding.status for finding in packages.examine_packages()} == {"ok"}


@pytest.mark.parametrize(
    ("versions", "check", "status", "said"),
    [
        ({"lightning": "2.6.3"}, "bad releases", "error", "malware"),
        ({"fastapi": "0.151.2"}, "bad releases", "error", "breaks Prefect's server"),
        ({"mlflow": "2.0.0"}, "packages", "error", "mlflow 2.0.0 (<3.19,>=3.17 is needed)"),
        ({"prefect": None}, "packages", "error", "prefect missing"),
        ({"numpy": "2.3.0"}, "lock", "warning", "numpy 2.3.0 (locked: "),
    ],
)
def test_what_is_wrong_is_found(pretend, versions, check, status, said):
    pretend(**versions)
    finding = by_check()[check]
    assert finding.status == status
    assert said in finding.found
    assert finding.remedy


def test_the_local_part_of_a_version_is_not_another_version(pretend):
    pretend(torch="2.13.0+cpu")
    assert by_check()["lock"].status == "ok"
