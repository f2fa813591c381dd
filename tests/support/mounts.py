"""File systems that a test mounts."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(directory, *command):
    """Mount on a new directory by a command, to which the directory is added. Skips where nothing may be mounted."""
    directory.mkdir(parents=True)
    done = subprocess.run([*command, directory], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{directory.name} cannot be mounted: {done.stderr.strip()}; run as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
