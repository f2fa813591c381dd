"""A disk that is soon full, as it is on a host that others have filled."""

import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(directory, megabytes):
    """Mount a small disk on a new directory; yields a file for `fill`. Skips where nothing may be mounted."""
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", directory]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}; run as root")
    try:
        yield directory / "filler"
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(path):
    """Write until there is no byte left."""
    with path.open("wb", buffering=0) as stream:
        for size in (65536, 4096):
            with suppress(OSError):
                while stream.write(bytes(size)):
                    pass
