"""Removes what Paceline has made on this host; what belongs to others, or to the clone, is named only."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from infra.services.home import Home
from infra.services.start import check_idle, down
from infra.services.supervisor import MADE, REPOSITORY
from paceline.conf.environment import Environment
from paceline.tasks.errors import InputError

RUNNING_SYSTEMD = Path("/run/systemd/system")
STATE = (
    *("runs", "prepared", "rejected", "predictions", "pretrained", "models", "searches", "compiled", "cache", "doctor"),
    *("flow-runs", "slurm", "tls", "judge", "prefect", "mlartifacts", "mlflow.db*", ".doctor-*"),
)
"""What Paceline makes in PACELINE_HOME, besides services."""


def uninstall(home: Home, units: Path, *, remove: bool, say: Callable[[str], None]) -> None:
    """Stop the services and remove their home, what Paceline made in PACELINE_HOME, units, leases and copies.

    Without `remove` only say what that would be. Raises InputError: other processes of Paceline run.
    """
    environment = Environment()
    if any(place.is_relative_to(environment.root) for place in (REPOSITORY, Path.home(), Path.cwd())):
        raise InputError(
            f"PACELINE_HOME={environment.root} is or holds a directory of yours; remove by hand what it has"
        )
    check_idle(home, environment.root)
    user = (environment.root if environment.root.exists() else Path.home()).stat().st_uid
    siblings = (f"{home.root.name}.before-*", f"{home.root.name}.restoring", f".{home.root.name}.lock")
    unit_files = [path for path in sorted(units.glob("paceline*")) if path.is_file() and MADE in path.read_text()]
    places = [*unit_files, home.root, environment.cache_directory / f"user-{user}"]
    places += [path for path in environment.leases.glob("*") if path.stat().st_uid == user]
    places += [path for pattern in siblings for path in sorted(home.root.parent.glob(pattern))]
    places += [path for pattern in STATE for path in sorted(environment.root.glob(pattern))]
    backups = [Path(home.settings().backups or home.root)] if home.is_made else []
    backups = [place for place in backups if not any(place.is_relative_to(path) for path in places)]
    for path in (path for path in places if path.exists()):
        files = path.rglob("*") if path.is_dir() else [path]
        num_bytes = sum(file.lstat().st_size for file in files if not file.is_symlink())
        say(f"{'removes' if remove else 'would remove'} {path} ({num_bytes / 2**20:.1f} MiB)")
    for place in backups:
        say(f"keeps {place}: the backups in it can bring everything back, and hold the secrets")
    if not remove:
        say("nothing was removed; infra/uninstall --yes removes it")
        return
    if unit_files and RUNNING_SYSTEMD.exists():
        subprocess.run(["systemctl", "disable", "--now", *(path.name for path in unit_files)], check=True)
    if home.is_made:
        say(f"ended {', '.join(down(home)) or 'nothing'}")
    for path in places:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for directory in (environment.leases, environment.cache_directory, environment.root):
        with suppress(OSError):  # others have something in it, or it is not there
            directory.rmdir()
    remaining = [directory for directory in (environment.root, *backups, REPOSITORY) if directory.exists()]
    say(f"remove by hand, if nobody else needs them: {', '.join(map(str, remaining))} and Prefect's own home")
