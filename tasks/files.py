"""Files that are whole or absent, whatever crashes while they are written, and results of stages in such files.

Files that a process uses have shared locks, which keep them from `paceline clean` until the process ends.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from paceline.tasks.errors import RunError
from paceline.tasks.records.record import Record

TEMPORARY_SUFFIX = ".tmp"
OTHERS_WRITE = 0o022
R = TypeVar("R", bound=Record)

_held: dict[tuple[int, int], int] = {}  # device and inode of each file that this process holds, with its descriptor
logger = logging.getLogger(__name__)


def is_full(error: BaseException) -> bool:
    """Whether the disk or this user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def sha256_of(path: Path) -> str:
    """Hex digest of a file, by which it is known to be whole."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_durably(path: Path, content: bytes | memoryview, confirm: Callable[[], None] | None = None) -> None:
    """Write a file that is in memory; see `write_pieces`."""
    write_pieces(path, (content,), confirm=confirm)


def write_pieces(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    *,
    durably: bool = True,
    confirm: Callable[[], None] | None = None,
) -> None:
    """Write a file under a temporary name, push it to the disk if that is asked for, then give it its name.

    A retried task may overlap with its first try on another worker, so the temporary name is this call's own. An
    OSError names the file. `confirm` is called last before the file gets its name; its error leaves the path as it was.
    """
    temporary = path.with_name(f"{path.name}.{uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as stream:
            stream.writelines(pieces)
            if durably:
                stream.flush()
                os.fsync(stream.fileno())
        if confirm is not None:
            confirm()
        temporary.replace(path)
        if durably:
            sync_directory(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def make_directory(directory: Path) -> None:
    """Create a directory with its missing parents, so that a loss of power does not remove it from its parent again."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_directory(each.parent)


def sync_directory(directory: Path) -> None:
    """Push the names in a directory to the disk: a file's own `fsync` does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Push the files below a directory and their names to the disk, and the names of its parents up to the second."""
    for place, _, names in os.walk(directory):
        for name in names:
            with (Path(place) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(place))
    for parent in directory.parents[:2]:
        sync_directory(parent)


def nearest_existing(path: Path) -> Path:
    """The path itself where it exists, else its nearest ancestor that does: where creating it would begin."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def compiled_directory(home: Path) -> Path:
    """The directory for compiled code of the installed version of torch; `paceline clean` removes the others."""
    return home / "compiled" / f"torch-{metadata.version('torch')}"


def private_directory(parent: Path, purpose: str = "code that is executed") -> Path:
    """The directory below a parent in which only this process's user can write; made if it is not there.

    RunError if what is there is somebody else's, a link, or others can write to it.
    """
    user = os.geteuid()
    directory = parent / f"user-{user}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError as error:
        raise RunError(f"{directory} cannot be made ({error.strerror}); let this user write to {parent}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or mode & OTHERS_WRITE:
        raise RunError(
            f"{directory} is to hold {purpose}, and user {status.st_uid} owns it with mode {mode:o}; it "
            f"must be a directory of user {user} that nobody else can write to: remove it, or move PACELINE_HOME to a "
            "disk that knows owners and modes"
        )
    return directory


class _Stored(Record):
    result: str  # as JSON
    sums: dict[str, str]  # sha256 of each file that it names


def save_result(path: Path, result: Record, files: Sequence[str], confirm: Callable[[], None] | None = None) -> None:
    """Store a stage's result, which names `files`, with a run, so that a resumed run does not repeat the stage."""
    stored = _Stored(result=result.model_dump_json(), sums={file: sha256_of(Path(file)) for file in files})
    write_durably(path, stored.model_dump_json().encode(), confirm)


def load_result(path: Path, kind: type[R], files: Sequence[str] | None = None) -> R | None:
    """Load a stored result; None if it is missing, of another version, or one of its files has changed."""
    try:
        stored = _Stored.model_validate_json(path.read_bytes())
        result = kind.model_validate_json(stored.result)
        sound = all(sha256_of(Path(file)) == digest for file, digest in stored.sums.items())
    except (OSError, ValidationError):
        return None
    return result if sound and (files is None or set(files) == set(stored.sums)) else None


class MeasurementCache(Generic[R]):
    """A measurement for later runs on the same hardware, in a file named after the facts that it depends on."""

    def __init__(self, home: Path, facts: Mapping[str, object], kind: type[R]) -> None:
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self._path = home / "searches" / f"{key}.json"
        self._kind = kind

    def find(self) -> R | None:
        """The measurement of an earlier run; None without a readable one."""
        try:
            found = self._kind.model_validate_json(self._path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None
        with suppress(OSError):  # another user's
            os.utime(self._path)  # a clean-up removes what no run has used for long
        return found

    def keep(self, result: R) -> None:
        """Save a measurement."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, result.model_dump_json().encode())


def hold(path: Path) -> bool:
    """Hold a file until this process ends, and set its time to now; return whether the file is there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    identity = _identity(os.fstat(descriptor))
    if identity in _held:
        os.close(descriptor)
        return True
    _held[identity] = descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a clean-up, which holds it for an instant
        if _identity(path.stat()) == identity:
            with suppress(OSError):  # another user's
                os.utime(path)
            return True
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s cannot be locked (%s): call paceline clean only while nothing runs", path, error.strerror)
        return True
    os.close(_held.pop(identity))
    return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock a file. Raises BlockingIOError: it is held; FileNotFoundError: it is gone; OSError: it cannot be locked."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _identity(path.stat()) != _identity(os.fstat(file.fileno())):
            raise FileNotFoundError(path)  # another file has its name now
        yield


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
