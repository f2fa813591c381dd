"""A simulated disk: what was not synced may be lost with the power. Locks may not hold between hosts."""

import errno
import fcntl as real_fcntl
import io
import os as real_os
import stat
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from types import SimpleNamespace

from tests.simulation.kernel import EPOCH, Kernel

ROOT = SimpleNamespace(is_directory=True)
KERNEL: Kernel
"""Kernel of the current history, which `use` sets: a path has no room for it."""
SECONDS = {"fsync": 0.02, "rename": 0.004, "write": 0.004, "make": 0.004, "remove": 0.002}


def use(kernel):
    global KERNEL  # noqa: PLW0603  a path has no room for it
    KERNEL = kernel


def error(number, path):
    return OSError(number, real_os.strerror(number), str(path))


class Inode:
    """A file or a directory, as processes see it and as it is on the platter."""

    def __init__(self, is_directory):
        self.is_directory, self.num_links, self.mtime = is_directory, 1, KERNEL.now
        self.content, self.synced = bytearray(), b""
        self.entries, self.synced_entries, self.pending = {}, {}, []
        self.writer = None
        self.locks = {}

    def change(self, *changes):
        """Change names of a directory; together, as `rename` does."""
        for name, inode in changes:
            if inode is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = inode
        self.pending.append(changes)

    def sync(self):
        self.synced, self.synced_entries, self.pending = bytes(self.content), dict(self.entries), []

    def crash(self, random):
        """Come back after a loss of power with what was synced, and some of the rest in its order."""
        self.locks.clear()
        if not self.is_directory:
            if bytes(self.content) != self.synced and random.random() < 0.7:
                self.content = bytearray(self.synced)
        else:
            changes = self.pending[: random.choice((0, random.randint(0, len(self.pending))))]
            self.entries = dict(self.synced_entries)
            for change in changes:
                for name, inode in change:
                    if inode is None:
                        self.entries.pop(name, None)
                    else:
                        self.entries[name] = inode
            for inode in self.entries.values():
                inode.num_links = 1  # a name that was removed may be back
                inode.crash(random)
        self.sync()


class Disk:
    """A file system; `has_locks` between hosts."""

    def __init__(self, server=None, has_locks=True):
        self.server, self.has_locks = server, has_locks
        self.root, self.is_full, self.away = Inode(True), False, set()

    def find(self, parts):
        inode = self.root
        for part in parts:
            if not inode.is_directory or (inode := inode.entries.get(part)) is None:
                return None
        return inode

    def lose_power(self, host):
        if self.server in (None, host):
            self.root.crash(KERNEL.random)
        else:
            self._lose_writes(self.root, host)

    def _lose_writes(self, inode, host):
        """Files whose content a client had not yet sent to the server."""
        if inode.is_directory:
            for entry in inode.entries.values():
                self._lose_writes(entry, host)
        elif inode.writer is host and bytes(inode.content) != inode.synced:
            inode.content = bytearray(inode.synced)

    def delay(self, kind):
        """Take time; wait while the disk does not answer this host."""
        process = KERNEL.current.process
        while process.host in self.away:
            KERNEL.wait(0.5)
        KERNEL.wait(KERNEL.random.random() * SECONDS[kind])

    def check_space(self, path):
        if self.is_full:
            raise error(errno.ENOSPC, path)

    def drop_locks(self, host, inode=None):
        """Lose a host's locks, as when the lease of an NFS client runs out."""
        inode = inode or self.root
        inode.locks = {file: mode for file, mode in inode.locks.items() if file.host is not host}
        for entry in inode.entries.values():
            self.drop_locks(host, entry)


class OpenFile:
    """An open file description, which processes share with those that inherit it."""

    def __init__(self, inode, path, disk):
        self.inode, self.path, self.disk, self.offset, self.count = inode, path, disk, 0, 0
        self.host = KERNEL.current.process.host

    def close(self):
        self.count -= 1
        if self.count == 0:
            self.inode.locks.pop(self, None)

    def lock(self, mode):
        visible = [
            (other, held)
            for other, held in self.inode.locks.items()
            if other is not self and (self.disk.has_locks or other.host is self.host)
        ]
        if any(mode == "exclusive" or held == "exclusive" for _, held in visible):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        self.inode.locks[self] = mode


def add_descriptor(file, process=None):
    process = process or KERNEL.current.process
    number = 3
    while number in process.files:
        number += 1
    process.files[number] = file
    file.count += 1
    return number


def descriptor(number):
    number = number if isinstance(number, int) else number.fileno()
    try:
        return KERNEL.current.process.files[number]
    except KeyError:
        raise error(errno.EBADF, number) from None


class ReadFile(io.BytesIO):
    """A file opened for reading, with what it held then."""

    def __init__(self, number, content):
        super().__init__(content)
        self._number, self._process = number, KERNEL.current.process
        self._file = descriptor(number)

    def fileno(self):
        return self._number

    def close(self):
        if not self.closed:  # perhaps by the garbage collector
            super().close()
            if self._process.files.get(self._number) is self._file:
                del self._process.files[self._number]
                self._file.close()


class WriteFile:
    """A file opened for writing."""

    def __init__(self, number):
        self._number = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def fileno(self):
        return self._number

    def write(self, content):
        return write(self._number, content)

    def writelines(self, pieces):
        for piece in pieces:
            self.write(piece)

    def flush(self):
        pass

    def close(self):
        close(self._number)


class SimPath(PurePosixPath):
    """`pathlib.Path` on the disks of the current process's host; the first folder names the disk."""

    __slots__ = ()

    def _disk(self):
        return KERNEL.current.process.host.disks[self.parts[1]]

    def _inode(self):
        parts = self._parts
        if len(parts) < 2:
            return ROOT
        inode = KERNEL.current.process.host.disks[parts[1]].root
        for part in parts[2:]:
            inode = inode.entries.get(part)
            if inode is None:
                return None
        return inode

    def _existing(self):
        if (inode := self._inode()) is None:
            raise error(errno.ENOENT, self)
        return inode

    def _directory(self):
        inode = self.parent._existing()
        if not inode.is_directory:
            raise error(errno.ENOTDIR, self.parent)
        return inode

    def absolute(self):
        return self

    expanduser = absolute

    def exists(self):
        return self._inode() is not None

    def is_dir(self):
        return (inode := self._inode()) is not None and inode.is_directory

    def is_file(self):
        return (inode := self._inode()) is not None and not inode.is_directory

    def is_symlink(self):
        return False

    def stat(self):
        return status(self._existing())

    lstat = stat

    def chmod(self, mode):
        pass

    def mkdir(self, mode=0o777, parents=False, exist_ok=False):
        inode = self._inode()
        if inode is not None:
            if exist_ok and inode.is_directory:
                return
            raise error(errno.EEXIST, self)
        if parents and self.parent._inode() is None:
            self.parent.mkdir(parents=True, exist_ok=True)
        disk = self._disk()
        disk.delay("make")
        disk.check_space(self)
        directory = self._directory()
        if self.name in directory.entries:
            if exist_ok:
                return
            raise error(errno.EEXIST, self)
        directory.change((self.name, Inode(True)))
        KERNEL.world.ledger.note_directory(self)

    def open(self, mode="r", encoding=None):
        flags = {"r": real_os.O_RDONLY, "w": real_os.O_CREAT | real_os.O_TRUNC, "x": real_os.O_CREAT | real_os.O_EXCL}
        flags["a"] = real_os.O_CREAT | real_os.O_APPEND
        number = open_file(self, flags[mode[0]])
        return ReadFile(number, bytes(descriptor(number).inode.content)) if mode[0] == "r" else WriteFile(number)

    def read_bytes(self):
        inode = self._existing()
        if inode.is_directory:
            raise error(errno.EISDIR, self)
        return bytes(inode.content)

    def read_text(self, encoding=None, errors=None):
        return self.read_bytes().decode()

    def write_bytes(self, content):
        with self.open("wb") as file:
            file.write(content)

    def write_text(self, text, encoding=None):
        self.write_bytes(text.encode())

    def touch(self):
        with self.open("ab"):
            pass

    def replace(self, target):
        self._disk().delay("rename")
        inode, before, after = self._existing(), self._directory(), target._directory()
        KERNEL.world.ledger.note_rename(target)
        if before is after:
            before.change((self.name, None), (target.name, inode))
        else:
            before.change((self.name, None))
            after.change((target.name, inode))
        return target

    rename = replace

    def unlink(self, missing_ok=False):
        if self._inode() is None and missing_ok:
            return
        self._disk().delay("remove")
        inode = self._inode()
        if inode is None:
            if missing_ok:
                return
            raise error(errno.ENOENT, self)
        inode.num_links = 0
        self._directory().change((self.name, None))

    def remove_tree(self):
        if self._inode() is not None:
            self._disk().delay("remove")
            self._directory().change((self.name, None))

    def iterdir(self):
        return [self / name for name in self._existing().entries]

    def rglob(self, pattern):
        yield from self.glob(pattern)
        for path in self.iterdir() if self.exists() else ():
            if path.is_dir():
                yield from path.rglob(pattern)

    def glob(self, pattern):
        first, *rest = pattern.split("/")
        inode = self._inode()
        if inode is None or not inode.is_directory:
            return
        for name in list(inode.entries):
            if fnmatchcase(name, first):
                path = self / name
                if not rest:
                    yield path
                elif path.is_dir():
                    yield from path.glob("/".join(rest))


def status(inode):
    kind = stat.S_IFDIR if inode.is_directory else stat.S_IFREG
    return SimpleNamespace(
        st_mode=kind | 0o600,
        st_nlink=inode.num_links,
        st_size=len(inode.content),
        st_mtime=EPOCH + inode.mtime,
        st_mtime_ns=int((EPOCH + inode.mtime) * 1e9),
        st_uid=0,
    )


def open_file(path, flags, mode=0o777):
    path = path if isinstance(path, SimPath) else SimPath(path)
    disk, inode = path._disk(), path._inode()
    is_new = inode is None
    if is_new:
        if not flags & real_os.O_CREAT:
            raise error(errno.ENOENT, path)
        disk.delay("make")
        disk.check_space(path)
        directory = path._directory()
        inode = directory.entries.get(path.name)
        if inode is None:
            inode = Inode(False)
            inode.writer = KERNEL.current.process.host
            directory.change((path.name, inode))
        elif flags & real_os.O_EXCL:
            raise error(errno.EEXIST, path)
    elif flags & real_os.O_EXCL:
        raise error(errno.EEXIST, path)
    if flags & real_os.O_DIRECTORY and not inode.is_directory:
        raise error(errno.ENOTDIR, path)
    if inode.is_directory and not flags & real_os.O_DIRECTORY:
        raise error(errno.EISDIR, path)
    if flags & real_os.O_TRUNC:
        inode.content = bytearray()
    return add_descriptor(OpenFile(inode, path, disk))


def close(number):
    descriptor(number).close()
    KERNEL.current.process.files.pop(number if isinstance(number, int) else number.fileno())


def write(number, content):
    file = descriptor(number)
    if isinstance(file, PipeEnd):
        return file.write(content)
    file.disk.delay("write")
    file.disk.check_space(file.path)
    inode = file.inode
    inode.content += content
    inode.writer, inode.mtime = KERNEL.current.process.host, KERNEL.now
    return len(content)


def fsync(number):
    file = descriptor(number)
    file.disk.delay("fsync")
    if not file.inode.is_directory:
        file.disk.check_space(file.path)
    file.inode.sync()


def pwrite(number, content, offset):
    file = descriptor(number)
    file.disk.check_space(file.path)
    file.inode.content[offset : offset + len(content)] = content
    return len(content)


def pread(number, size, offset):
    return bytes(descriptor(number).inode.content[offset : offset + size])


def ftruncate(number, size):
    del descriptor(number).inode.content[size:]


def utime(number):
    descriptor(number).inode.mtime = KERNEL.now


def fdopen(number, mode):
    return ReadFile(number, bytes(descriptor(number).inode.content))


def flock(number, operation):
    file = descriptor(number)
    if operation & real_fcntl.LOCK_UN:
        file.inode.locks.pop(file, None)
    else:
        file.lock("exclusive" if operation & real_fcntl.LOCK_EX else "shared")


class PipeEnd:
    """One end of a pipe."""

    def __init__(self, pipe, writes):
        self.pipe, self.writes, self.count = pipe, writes, 0

    def close(self):
        self.count -= 1
        if not self.count:
            self.pipe.open_ends.discard(self)

    def write(self, content):
        if not any(not end.writes for end in self.pipe.open_ends):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self.pipe.content += content
        return len(content)

    def read(self, size):
        if not self.pipe.content and any(end.writes for end in self.pipe.open_ends):
            raise BlockingIOError(errno.EWOULDBLOCK, "no data")
        content, self.pipe.content = self.pipe.content[:size], self.pipe.content[size:]
        return bytes(content)


def pipe():
    shared = SimpleNamespace(content=b"", open_ends=set())
    ends = [PipeEnd(shared, writes) for writes in (False, True)]
    shared.open_ends.update(ends)
    return tuple(add_descriptor(end) for end in ends)


def read(number, size):
    return descriptor(number).read(size)
