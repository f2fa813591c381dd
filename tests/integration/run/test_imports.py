"""What each process of a run imports: packages that it has no use for, and a budget of modules."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_lightning import PACKAGE
from tests.support.scratch_cluster import ScratchCluster

RECORDER = Path(__file__).parents[2] / "support" / "recorded"
KINDS = {
    "server": "paceline.tasks.train.launch.fork_server",
    "rank": "paceline.tasks.train.rank.main",
    "api": "paceline.flows.lifecycle.prefect_api",
    "guardian": "paceline.flows.lifecycle.guardian",
    "scheduler": "dask_scheduler",
    "nanny": "dask_worker",
    "worker": "multiprocessing.spawn",
    "flow": "bin/paceline run",
}
"""By a part of its command."""
ENGINES = {
    *("torch", "lightning", "torchmetrics", "mlflow", "prefect", "dask", "distributed", "pandas", "pyarrow"),
    *("matplotlib", "sklearn", "scipy", "numpy", "sqlalchemy", "optuna", "jsonargparse", "PIL", "rich", "pydantic"),
}
LIGHTNING = {"torch", "lightning", "torchmetrics", "scipy", "matplotlib", "numpy", "PIL", "rich", "pydantic"}
"""Lightning imports torchmetrics, which imports SciPy, Matplotlib and Pillow."""
DASK = {"dask", "distributed", "numpy"}
PREPARES = DASK | {"pydantic", "PIL"}
"""A scheduler too imports the functions of a graph: it unpickles them."""
TRACKS = {"prefect", "mlflow", "pandas", "pyarrow", "sqlalchemy", "rich", "pydantic", "scipy", "matplotlib", "PIL"}
MAY = {  # packages of ENGINES, number of modules
    "flow": (TRACKS | DASK, 4500),
    "api": ({"prefect", "sqlalchemy", "rich", "pydantic"}, 2950),
    "guardian": (set(), 80),
    "scheduler": (PREPARES, 1200),
    "nanny": (DASK, 1200),
    "worker": (PREPARES, 1200),
    "rank": (LIGHTNING, 4000),
    "server": (LIGHTNING | {"jsonargparse"}, 4500),
}
PLUGIN = "prefect_dask"
"""Prefect's server imports what registers itself with it, and so Dask, if it is there. Paceline does not need it."""


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """The modules that processes have imported so far, by kind of process and one after the other."""
    monkeypatch.setenv("PACELINE_TEST_IMPORTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def read():
        found = {}
        for path in tmp_path.glob("*.command"):
            command, imports = path.read_text(), path.with_suffix(".imports")
            kind = next((kind for kind, part in KINDS.items() if part in command), None)
            if kind and imports.exists():
                found.setdefault(kind, []).append(set(imports.read_text().splitlines()))
        return found

    return read


def check(found, kinds, also=frozenset()):
    assert found.keys() >= kinds
    for kind, processes in found.items():
        packages, most = MAY[kind]
        for modules in processes:
            imported = {name.partition(".")[0] for name in modules}
            plugins = DASK if kind == "api" and PLUGIN in imported else set()
            assert imported & ENGINES - packages - also - plugins == set(), kind
            assert len(modules) <= most, kind


def test_a_command_imports_few_modules_before_its_flow(program, processes):
    for arguments in (["run", "nonsense"], ["run", "digits", "recipe.num_epoch=1"]):
        process = program(*arguments)
        process.communicate(timeout=60)
        assert process.returncode == 2
    for modules in processes()["flow"]:
        assert {name.partition(".")[0] for name in modules} & ENGINES == {"pydantic"}
        assert len(modules) <= 600


def test_checks_import_no_engine_before_they_start_parts_of_a_run():
    """Prefect's API, the cluster and its ranks start while MLflow and Prefect are imported, and not after it."""
    names = "paceline.flows.checks.preflight, paceline.flows.checks.lightning"
    script = f"import sys, {names}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    packages = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert set(packages) & ENGINES == {"pydantic", "numpy", "PIL"}


@pytest.mark.slow
def test_the_processes_of_a_run_import_what_they_use(program, processes):
    with ScratchCluster(1) as cluster:
        settings = ["cluster.kind=address", f"cluster.address={cluster.address}", "cluster.tls=off"]
        small = ["recipe.num_epochs=1", "model.width=4", "speedup.max_seconds=3", "execution.precision=32-true"]
        process = program("run", "digits", *small, *settings)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    check(processes(), {"flow", "api", "guardian", "scheduler", "nanny", "worker", "rank"})


@pytest.mark.slow
def test_the_processes_of_own_code_import_what_they_use(program, processes, tmp_path):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    code = shutil.copytree(PACKAGE.parent / "shapes", tmp_path / "code")
    short = ["trainer.max_epochs=1", "speedup.baseline=none"]
    process = program("run", str(code / "configs" / "perceptron.yaml"), "--code", str(code), *short)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    found = processes()
    check(found, {"flow", "api", "guardian", "worker", "server"})
    assert {"matplotlib", "sklearn"}.isdisjoint(*found["flow"]), "they are for the report of a preset"
