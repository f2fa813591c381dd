"""A disk that is soon full, as it is on a host that others have filled."""

from contextlib import contextmanager, suppress

from tests.support.mounts import mounted


@contextmanager
def small_disk(directory, megabytes):
    """Mount a small disk on a new directory; yields a file for `fill`. Skips where nothing may be mounted."""
    with mounted(directory, "mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs"):
        yield directory / "filler"


def fill(path):
    """Write until there is no byte left."""
    with path.open("wb", buffering=0) as stream:
        for size in (65536, 4096):
            with suppress(OSError):
                while stream.write(bytes(size)):
                    pass
