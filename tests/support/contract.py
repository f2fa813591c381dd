"""Public names of a run, a study and a sweep: the keys of `--json` and the names in MLflow.

    python tests/support/contract.py HOME PROGRAM [ARGUMENT...] > names.json

PROGRAM is the command of the version to look at, for example `.venv/bin/paceline`. Compare the files of two versions to
show that a change of the code leaves the names as they were.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlflow.artifacts import list_artifacts
from mlflow.tracking import MlflowClient

SHORT = ["speedup.max_seconds=3", "execution.accelerator=cpu"]
COMMANDS = {
    "run": ["run", "digits", "recipe.num_epochs=1", *SHORT],
    "study": [
        *["study", "digits", "--axis", "execution.memory_format=contiguous,channels_last", "--repeats", "2"],
        *["recipe.num_epochs=1", *SHORT],
    ],
    "sweep": ["sweep", "digits", "--param", "recipe.learning_rate=[0.01,0.02]", "--trials", "2", "recipe.num_epochs=1"],
}


def key_paths(value: Any, path: str = "") -> set[str]:
    """Paths of all keys below a JSON value; the items of a list share one path."""
    if isinstance(value, dict):
        return {f"{path}.{key}" for key in value}.union(
            *(key_paths(item, f"{path}.{key}") for key, item in value.items())
        )
    if isinstance(value, list):
        return set().union(*(key_paths(item, f"{path}[]") for item in value))
    return set()


def artifact_paths(run_id: str, folder: str | None = None) -> set[str]:
    paths = set()
    for item in list_artifacts(run_id=run_id, artifact_path=folder):
        paths |= artifact_paths(run_id, item.path) if item.is_dir else {item.path}
    return paths


def public_names(program: list[str], home: Path) -> dict[str, Any]:
    """Names by command; starts each command in a PACELINE_HOME of its own below `home`."""
    names = {}
    for command, arguments in COMMANDS.items():
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        environment = os.environ | {"PACELINE_HOME": str(home / command)}
        done = subprocess.run([*program, *arguments, "--json"], env=environment, stdout=subprocess.PIPE, check=True)
        names[command] = {"json": sorted(key_paths(json.loads(done.stdout.splitlines()[-1])))}
        os.environ["MLFLOW_TRACKING_URI"] = uri = f"sqlite:///{home / command / 'mlflow.db'}"
        client = MlflowClient(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for run in client.search_runs(experiments):
            role = run.data.tags.get("paceline.role", "run")
            kinds = {"metrics": run.data.metrics, "tags": run.data.tags, "params": run.data.params}
            kinds["artifacts"] = artifact_paths(run.info.run_id)
            for kind, values in kinds.items():
                names[command][f"{role} {kind}"] = sorted({*names[command].get(f"{role} {kind}", ()), *values})
    return names


if __name__ == "__main__":
    json.dump(public_names(sys.argv[2:], Path(sys.argv[1])), sys.stdout, indent=1)
