"""Which code is the user's, and where an error passed through it."""

import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from paceline.tasks.errors import causes_of, one_line

NOT_OF_USER = sys.stdlib_module_names - {"__main__"} | {
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "numpy",
    "paceline",
    "pytorch_lightning",
    "torch",
}
"""Top packages whose code is neither the user's nor a third party's."""
PACKAGE = Path(__file__).parents[2]


class UserError(NamedTuple):
    """An error, and the newest line of the user's code that it passed through."""

    error: BaseException
    file: str
    line: int
    is_import: bool  # whether it was raised while a module of the user's was imported

    def __str__(self) -> str:
        return f"{type(self.error).__name__} ({one_line(self.error)}) in {self.file}, line {self.line}"

    @property
    def hint(self) -> str:
        """What to do about it."""
        return f"fix {Path(self.file).name}"


def is_of_user(module: str) -> bool:
    """Whether the code of a module, by its name, is the user's or a third party's."""
    return module.partition(".")[0] not in NOT_OF_USER


def find_user_error(error: BaseException) -> UserError | None:
    """The outermost error of a chain that passed through the user's code; None without one.

    An error that jsonargparse raised counts only if there is no other one: it repeats what a class raised.
    """
    errors = [*causes_of(error)]
    found = [one for each in errors if not _is_of_jsonargparse(each) and (one := _in_user_code(each)) is not None]
    return next(iter(found), None) or next(filter(None, map(_in_user_code, errors)), None)


def _in_user_code(error: BaseException) -> UserError | None:
    if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename).is_file():
        return UserError(error, error.filename, error.lineno or 1, is_import=True)
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_frame_of_user(frame)]
    if not frames:
        return None
    frame, line = frames[-1]
    is_import = any(frame.f_code.co_name == "<module>" for frame, _ in frames)
    return UserError(error, frame.f_code.co_filename, line, is_import)


def _is_frame_of_user(frame: FrameType) -> bool:
    return is_of_user(_module_of(frame)) and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE)


def _is_of_jsonargparse(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _module_of(frames[-1]).partition(".")[0] == "jsonargparse"


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
