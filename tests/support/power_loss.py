"""A disk that loses its power: a file system on a loop device, shut down by the kernel without a flush."""

import fcntl
import os
import shutil
import struct
import subprocess
from contextlib import contextmanager

import pytest

from tests.support.mounts import mounted
from tests.support.patience import until

SHUT_DOWN = 0x8004587D
"""`EXT4_IOC_SHUTDOWN` and `XFS_IOC_GOINGDOWN`."""
WITHOUT_FLUSH = 2
"""Neither data nor the journal reach the disk; `NOLOGFLUSH`."""


class Disk:
    """A mounted file system in an image."""

    def __init__(self, image, path):
        self.image, self.path = image, path

    @property
    def command(self):
        return "mount", "-o", "loop", self.image

    def lose_power(self):
        place = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(place, SHUT_DOWN, struct.pack("I", WITHOUT_FLUSH))
        finally:
            os.close(place)

    def restore_power(self):
        """Mount again, by which the journal is replayed; all processes that used it must be ending."""
        until(self.unmount, "unmounted disk", seconds=60)
        subprocess.run([*self.command, self.path], check=True)

    def unmount(self):
        return subprocess.run(["umount", self.path], capture_output=True, check=False).returncode == 0


@contextmanager
def disk(directory, kind, megabytes=512):
    """A mounted disk. Skips where there is no such file system, or nothing may be mounted."""
    maker = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if maker is None:
        pytest.skip(f"there is no mkfs.{kind}")
    found = Disk(directory / f"{kind}.img", directory / kind)
    with found.image.open("wb") as image:
        image.truncate(megabytes * 2**20)
    subprocess.run([maker, "-q", found.image], check=True)
    with mounted(found.path, *found.command):
        yield found
