"""Environment of a run: commit, differences, lock, versions, hosts, devices; `environment.json`."""

import hashlib
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.tasks.fingerprint import code_fingerprint

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = REPOSITORY / "infra" / "lock.txt"
PACKAGES = (
    *("paceline", "torch", "lightning", "mlflow", "prefect", "dask", "distributed"),
    *("numpy", "pydantic", "pillow", "scikit-learn"),
)
MAX_DIFF_CHARACTERS = 200_000


def describe_environment(hosts: tuple[str, ...], devices: tuple[str, ...]) -> dict[str, Any]:
    """Facts for repeating the run; what is not known is None."""
    return {
        "commit": _own("rev-parse", "HEAD"),
        "diff": (_own("diff", "HEAD") or "")[:MAX_DIFF_CHARACTERS] or None,
        "code": code_fingerprint(),
        "lock": hashlib.sha256(LOCK.read_bytes()).hexdigest() if LOCK.exists() else None,
        "versions": package_versions(),
        "system": platform.platform(),
        "hosts": list(hosts),
        "devices": list(devices),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages on which results depend."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES}


@cache
def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not there."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _own(*arguments: str) -> str | None:
    # installed from a wheel, a repository further up is not this code
    return git(REPOSITORY, *arguments) if (REPOSITORY / ".git").exists() else None


def git(place: Path, *arguments: str) -> str | None:
    """Output of a git command in a folder; None where it fails."""
    command = ["git", "-C", str(place), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
