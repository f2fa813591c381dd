"""The wheel owns one import name: it works next to a user's own packages called conf, flows and tasks."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", directory, ROOT], check=True, cwd=directory, timeout=120)
    (built,) = directory.glob("paceline-*.whl")
    return built


def test_the_wheel_owns_one_name_and_brings_its_presets(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"paceline"}
    assert "paceline/conf/presets/digits.yaml" in names
    assert "paceline/conf/plans/acceleration.yaml" in names
    assert "paceline/conf/dask/dask.yaml" in names
    assert "paceline/tasks/train/rank/main.py" in names


@pytest.mark.slow
def test_a_user_with_packages_of_the_same_names_runs_digits(wheel, tmp_path):
    """In an environment that has the dependencies and nothing of the repository."""
    home = tmp_path / "environment"
    venv.create(home)
    packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    zipfile.ZipFile(wheel).extractall(packages)
    (own,) = {Path(path) for path in sys.path if path.endswith("site-packages")}
    (packages / "dependencies.pth").write_text(f"{own}\n")  # its own .pth files are not read
    user = tmp_path / "project"
    for name in ("conf", "flows", "tasks"):
        (user / name).mkdir(parents=True)
        (user / name / "__init__.py").write_text(f"raise ImportError('{name} of the user was imported')\n")
    (user / "check.py").write_text("import paceline.flows.cli; print(paceline.flows.cli.__file__)\n")
    environment = os.environ | {"PYTHONPATH": str(user), "PACELINE_HOME": str(tmp_path / "home")}
    python = home / "bin" / "python"
    where = subprocess.run([python, "check.py"], cwd=user, env=environment, capture_output=True, text=True, check=True)
    assert where.stdout.startswith(str(packages))
    command = [python, "-m", "paceline.flows.cli", "run", "digits", "recipe.num_epochs=1", "speedup.baseline=none"]
    run = subprocess.run(command, cwd=user, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "accuracy" in run.stderr
