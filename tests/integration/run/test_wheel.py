"""The wheel, as the image builds it, owns one import name: a user may have packages called conf, flows and tasks."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def copy_as_docker(directory):
    """What infra/Dockerfile copies before it installs Paceline, into a directory; links stay links."""
    assert not (ROOT / ".dockerignore").exists(), "here nothing is left out"
    before, install, _ = (ROOT / "infra" / "Dockerfile").read_text().partition("\nRUN pip install")
    assert install
    for line in before.splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                place = directory / target / (Path(source).name if target.endswith("/") else "")
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info")
                    shutil.copytree(ROOT / source, place, symlinks=True, ignore=leftovers, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, place)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Of the files that the image gets, which leave no module out: the tests below read and run it."""
    source, directory = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    copy_as_docker(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", directory, source], check=True, cwd=directory, timeout=120)
    (built,) = directory.glob("paceline-*.whl")
    return built


def test_the_wheel_owns_one_name_and_brings_all_modules_and_presets(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"paceline"}
    modules = {path.relative_to(ROOT) for room in ("conf", "flows", "tasks") for path in (ROOT / room).rglob("*.py")}
    assert {f"paceline/{module}" for module in modules} <= names
    assert "paceline/conf/presets/digits.yaml" in names
    assert "paceline/conf/plans/acceleration.yaml" in names
    assert "paceline/conf/dask/dask.yaml" in names


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
