"""Identity of the user's code: of the installed packages, and of the directory given by `--code`."""

import ast
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paceline.conf.environment import Environment
from paceline.conf.lightning import Lightning
from paceline.conf.plugins import code_digest, code_of
from paceline.tasks.errors import InputError
from paceline.tasks.files import sha256_of, write_durably

IMPORTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
ENGINES = ("lightning", "pytorch_lightning", "torch")
FOLDER = "code"
"""Folder of a run's directory with the copy of the user's directory that its ranks import."""
LIST = ".paceline.json"
"""File in that folder with the `_Contents` of the copy."""
START_CHECKPOINT = "start.ckpt"
"""Copy of the checkpoint that a run starts from, in its directory."""
OUTPUTS = (
    "lightning_logs",
    "mlruns",
    "mlartifacts",
    "mlflow.db",
    "mlflow.db-journal",
    "mlflow.db-shm",
    "mlflow.db-wal",
)
"""Files and folders that Lightning and MLflow write next to a script by default. Each training changes them."""
OUTPUT_ENDINGS = (".ckpt", ".log", ".out", ".err")
"""Endings of files that a shell, Slurm or a callback writes while a training runs; they are data."""
MAX_BYTES = 64 * 2**20
SAME_CODE = "install the same on every host and restart its workers, or start a new run with the changed code"

_Kind = Literal["file", "data", "folder"]


class _Contents(NamedTuple):
    """Relative paths of what the user's directory has and its copy gets."""

    files: list[Path]
    links: list[Path]  # to data
    folders: Sequence[Path] = ()  # also those without files; older copies do not list them


def import_from(directory: Path | None) -> None:
    """Make this process import from a directory first, as a script does from its own."""
    if directory is not None and str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def class_paths(tree: Any) -> list[str]:
    """All class paths in a configuration, at any depth."""
    if isinstance(tree, dict):
        paths = [tree["class_path"]] if isinstance(tree.get("class_path"), str) else []
        return paths + [path for value in tree.values() for path in class_paths(value)]
    return [path for value in tree for path in class_paths(value)] if isinstance(tree, list) else []


def possible_imports(tree: Any) -> list[str]:
    """Class paths, and all texts at any depth that may make jsonargparse import something or read a file of more.

    It takes the path of a class or function as it is for a class_path, and the path of a YAML file for its content.
    """
    return class_paths(tree) + [text for text in _texts(tree) if _names_file_or_module(text)]


def _texts(tree: Any) -> list[str]:
    if isinstance(tree, dict | list):
        return [text for value in (tree.values() if isinstance(tree, dict) else tree) for text in _texts(value)]
    return [tree] if isinstance(tree, str) else []


def _names_file_or_module(text: str) -> bool:
    package = text.partition(".")[0]
    is_module = IMPORTED.fullmatch(text) is not None and (package in sys.modules or find_spec(package) is not None)
    return is_module or (text.endswith((".yaml", ".yml", ".json")) and Path(text).is_file())


def package_names(
    settings: dict[str, Any],
    directory: Path | None,
    paths: Callable[[dict[str, Any]], list[str]] = class_paths,
) -> tuple[str, ...]:
    """Packages of the classes in a configuration, without Lightning's and those in the directory."""
    names = {path if "/" in path else path.partition(".")[0] for path in paths(settings)} - {*ENGINES}
    local = {
        name for name in names if directory and ((directory / name).is_dir() or (directory / f"{name}.py").is_file())
    }
    return tuple(sorted(names - local))


def identify(names: tuple[str, ...]) -> tuple[str, ...]:
    """Packages by name, version and digest, without importing them."""
    owners = metadata.packages_distributions() if names else {}  # it reads all installed packages
    packages = {name: owners.get(name, [name])[0] for name in names}
    return tuple(
        f"{package} {f'{metadata.version(package)} ' if name in owners else ''}(code {code_of(name)})"
        for name, package in packages.items()
    )


def data_paths(settings: dict[str, Any]) -> tuple[str, ...]:
    """Texts of a configuration that may be directories of data, or of what a training writes."""
    data, trainer = settings.get("data") or {}, settings.get("trainer") or {}
    return tuple(_texts([data.get("init_args"), trainer.get("default_root_dir")]))


def with_absolute_paths(tree: Any) -> Any:
    """A configuration in which texts that name something in the current directory are absolute paths."""
    if isinstance(tree, dict):
        return {key: with_absolute_paths(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_absolute_paths(value) for value in tree]
    is_path = isinstance(tree, str) and os.path.exists(tree)  # noqa: PTH110  which takes any text
    return os.path.normpath(Path(tree).absolute()) if is_path else tree


def identities(settings: dict[str, Any], directory: Path | None, data: Sequence[str] | None = None) -> tuple[str, ...]:
    """The directory by its digest without data, by default of the settings, and the packages of the classes."""
    data = data_paths(settings) if data is None else data
    local = (_identity(directory, _code_files(directory, data)),) if directory else ()
    return local + identify(package_names(settings, directory))


def source_digest(data: dict[str, Any], directory: Path | None) -> str:
    """Digest of the modules of a DataModule: those of its class, of its arguments, and of all that these import.

    Only modules of its package and of the user's directory count. They include those that functions import when they
    are called, by the names in their `import` statements.
    To be called in a process that has imported nothing else of them.
    """
    package = data["class_path"].partition(".")[0]
    import_module(data["class_path"].rpartition(".")[0])
    files = {
        name: Path(file)
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None))
        and (name.partition(".")[0] == package or (directory and Path(file).is_relative_to(directory)))
    }
    of_directory = [Path(place) for place in sys.path if directory and Path(place).is_relative_to(directory)]
    of_package = [Path(place).parent for place in getattr(sys.modules[package], "__path__", ())]
    waiting = _with_packages(text.split(".") for text in _texts(data) if IMPORTED.fullmatch(text))
    waiting = waiting.union(*(_names_imported_by(name, file) for name, file in files.items()))
    while waiting:
        name = waiting.pop()
        places = of_directory + (of_package if name.partition(".")[0] == package else [])
        if name not in files and (file := _file_of_module(name, places)) is not None:
            files[name] = file
            waiting |= _names_imported_by(name, file)
    return code_digest(files[name] for name in sorted(files))


def _names_imported_by(name: str, file: Path) -> set[str]:
    """Names that may be modules in all `import` statements of a module."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # it is compiled, or nobody can import it
        return set()
    package = name.split(".")[: None if file.stem == "__init__" else -1]
    imported = [each.name.split(".") for node in nodes if isinstance(node, ast.Import) for each in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            imported += [[*base, each.name] for each in node.names]
    return _with_packages(imported)


def _with_packages(names: Iterable[list[str]]) -> set[str]:
    """Names of modules, given by their parts, and of the packages that hold them."""
    return {".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)}


def _file_of_module(name: str, places: list[Path]) -> Path | None:
    """The Python file of a module or package in the first of several directories that has one."""
    paths = [place.joinpath(*name.split(".")) for place in places]
    files = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
    return next(filter(Path.is_file, files), None)


def require(expected: tuple[str, ...], settings: dict[str, Any], directory: Path | None) -> None:
    """Raise InputError: the code on this host is not that of the run."""
    here = identities(settings, directory)
    if here != expected:
        had = f"{' and '.join(here)}; expected is {' and '.join(expected)}"
        fault = f"the code on host {socket.gethostname()} is not the expected one: {had}"
        raise InputError(fault, hint=SAME_CODE)


def require_named(settings: dict[str, Any], packages: tuple[str, ...], directory: Path | None) -> None:
    """Raise InputError: a class of stored settings is of no package that their record names, and not of Lightning.

    Those who can write to a store, or offer a model, must not choose what a process imports.
    """
    named = {identity.partition(" ")[0] for identity in packages} | {"torchmetrics"}
    names = package_names(settings, directory)
    owners = metadata.packages_distributions() if names else {}
    for name in names:
        if named.isdisjoint([name, *owners.get(name, [])]):
            path = next(path for path in class_paths(settings) if path.partition(".")[0] == name)
            fault = f"class_path={path} is of none of the packages that are recorded with it"
            raise InputError(f"{fault} ({', '.join(packages) or 'none'})", hint="train again with the class you need")


def copy_own(own: Lightning, directory: Path, parent: Path | None = None) -> None:
    """Copy code and checkpoint into the directory of a run: the user's, or those that a parent run has copied.

    Raises InputError: the user's directory or checkpoint has changed since it was read.
    """
    if own.code is not None:
        source, read = (parent / FOLDER, None) if parent else (Path(own.code), next(iter(own.packages), None))
        copy(source, directory, data_paths(own.settings), read)
    if own.ckpt_path is not None:
        source, sha256 = (parent / START_CHECKPOINT, None) if parent else (Path(own.ckpt_path), own.ckpt_sha256)
        copy_checkpoint(source, directory, sha256)


def copy(source: Path, directory: Path, data: Sequence[str] = (), identity: str | None = None) -> None:
    """Copy the user's directory into that of a run, unless it is there: a resumed run keeps its code.

    The copy links to directories of data. Raises InputError: its files are not those of `identity`.
    """
    target = directory / FOLDER
    if target.is_dir():
        return
    temporary = target.with_name(f".{FOLDER}")
    shutil.rmtree(temporary, ignore_errors=True)
    contents = _contents(source, data)
    for name in contents.folders:  # a training may write into one that is empty
        (temporary / name).mkdir(parents=True, exist_ok=True)
    for name in (*contents.files, *contents.links):
        place = temporary / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name in contents.links:
            place.symlink_to((source / name).resolve())
        elif (source / name).exists():  # a training may have removed a file of its copy, which its ranks report
            write_durably(place, (source / name).read_bytes())
            shutil.copymode(source / name, place)  # the code may run scripts
    _write_list(temporary, contents)
    if identity not in (None, _identity(temporary, contents.files)):
        fault = f"--code {source} has changed since it was read"
        hint = "start again, and let nothing write there until the training has started, except into files like run.log"
        raise InputError(fault, hint=hint)
    temporary.rename(target)


@contextmanager
def link_written(source: Path, copied: Path, data: Sequence[str] = ()) -> Iterator[None]:
    """Link from a copy to what the body, for example `prepare_data`, writes into the user's directory."""
    before = {name for name, _ in _walk(source, data)}
    yield
    for name, _ in _walk(source, data):
        if name not in before:
            top = next((each for each in _downwards(name) if _is_free(copied / each)), None)
            if top is not None:
                if os.path.lexists(copied / top):
                    (copied / top).rmdir()
                (copied / top).symlink_to((source / top).resolve())


def _is_free(place: Path) -> bool:
    """Whether a link can take this place: nothing is there, or a folder that is empty."""
    return not os.path.lexists(place) or (place.is_dir() and not place.is_symlink() and not any(place.iterdir()))


def list_written(copied: Path) -> None:
    """Record what was written into a copy, or linked there, as links, so that copies of it link there too."""
    contents = _contents(copied, ())
    linked = [name for name in contents.folders if (copied / name).is_symlink()]  # they were empty before
    folders = [name for name in contents.folders if name not in linked]
    contents = _Contents(contents.files, [*contents.links, *linked], folders)
    links = contents.links
    known = {part for names in contents for name in names for part in (name, *name.parents)}
    for name, _ in sorted(_walk(copied, ())):
        top = next((each for each in _downwards(name) if each in links or each not in known), None)
        if top is not None and top not in links:
            links.append(top)
    _write_list(copied, contents)


def _downwards(name: Path) -> Iterator[Path]:
    """The folders above a relative path from the top down, then the path itself."""
    return reversed((name, *name.parents))


def _write_list(copied: Path, contents: _Contents) -> None:
    listed = [[str(name) for name in names] for names in contents]
    write_durably(copied / LIST, json.dumps(listed).encode())


def copy_checkpoint(source: Path, directory: Path, sha256: str | None = None) -> None:
    """Copy the checkpoint to start from into the directory of a run, where all hosts see it, unless it is there.

    Raises InputError: it is not the one with that digest.
    """
    target = directory / START_CHECKPOINT
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{START_CHECKPOINT}")
        shutil.copyfile(source, temporary)
        if sha256 not in (None, sha256_of(temporary)):
            raise InputError(f"ckpt_path={source} has changed since it was read", hint="start again with the new one")
        temporary.replace(target)


def check_directory(directory: Path) -> None:
    """Raise InputError: the directory does not exist, or holds no Python file."""
    if not directory.is_dir():
        raise InputError(f"--code {directory} is no directory", hint="give the directory of your code")
    if not any(kind == "file" and name.suffix == ".py" for name, kind in _walk(directory, ())):
        raise InputError(f"--code {directory} holds no Python file", hint="give the directory of your code")


def _contents(directory: Path, data: Sequence[str]) -> _Contents:
    """What `_walk` finds in a directory; of a copy, what was copied."""
    is_copy = directory.name == FOLDER and directory.resolve().parents[1].name == "runs"
    if is_copy and (directory / LIST).exists():  # trainings may have written next to their code
        listed = json.loads((directory / LIST).read_text(encoding="utf-8"))
        return _Contents(*(list(map(Path, names)) for names in listed))
    found = sorted(_walk(directory, data))
    kinds: tuple[_Kind, ...] = ("file", "data", "folder")
    return _Contents(*([name for name, kind in found if kind == each] for each in kinds))


def _walk(directory: Path, data: Sequence[str]) -> Iterator[tuple[Path, _Kind]]:
    """Files, data and folders of a directory by their relative paths. A directory of data is not entered.

    Without what is hidden or compiled, what trainings have written into the user's directory, virtual environments,
    what this user may not read, and links to what holds the code.
    Data are files with one of the `OUTPUT_ENDINGS`. A directory is, if `data` names it from the current one, or a link
    leads to it, if neither it nor a directory in it holds a Python file, or if it is both.
    """
    directory, home = directory.resolve(), Environment().root.resolve()
    named = [Path(text).resolve() for text in data if os.path.isdir(text)]  # noqa: PTH112  which takes any text

    def walk(folder: Path, above: frozenset[Path]) -> Iterator[tuple[Path, _Kind]]:
        if not os.access(folder, os.R_OK | os.X_OK):
            return
        for path in folder.iterdir():
            name = path.relative_to(directory)
            if name.parts[0] in OUTPUTS or _is_left_out(path):
                continue
            if path.is_file():
                yield name, "data" if path.suffix in OUTPUT_ENDINGS else "file"
            elif path.is_dir():
                place, is_link = path.resolve(), path.is_symlink()
                is_above = place == home or any(each.is_relative_to(place) for each in above)
                if is_above or os.access(path / "pyvenv.cfg", os.F_OK):  # a virtual environment
                    continue
                is_named = place in named
                if (is_link and is_named) or ((is_link or is_named) and not _holds_code(path)):
                    yield name, "data"
                else:
                    yield name, "folder"
                    yield from walk(path, above | {place})

    return walk(directory, frozenset({directory}))


def _is_left_out(path: Path) -> bool:
    """Whether a path is hidden, compiled, a link to what cannot be reached, or a file that this user may not read."""
    if path.name.startswith(".") or path.name == "__pycache__" or not os.access(path, os.F_OK):
        return True
    return path.is_file() and not os.access(path, os.R_OK)


def _holds_code(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.py", "*/*.py"))


def _code_files(directory: Path, data: Sequence[str]) -> list[Path]:
    """Files of the user's directory, without data. Raises InputError: they are too large to be copied."""
    files = _contents(directory, data).files
    size = sum((directory / name).stat().st_size for name in files if (directory / name).exists())
    if size > MAX_BYTES:
        fault = f"--code {directory} holds {size / 2**20:,.0f} MiB, and each run copies at most {MAX_BYTES / 2**20:.0f}"
        hint = "move data and checkpoints out of the directory of your code, or name their directory in data.init_args"
        raise InputError(fault, hint=hint)
    return files


def _identity(directory: Path, files: list[Path]) -> str:
    """The name under which a directory is recorded, with the digest of these files."""
    digest = hashlib.sha256()
    for name in files:
        content = (directory / name).read_bytes() if (directory / name).exists() else b"missing"
        digest.update(os.fsencode(f"{name} {len(content)}\n"))  # a name may be in any encoding
        digest.update(content)
    return f"directory (code {digest.hexdigest()[:12]})"
