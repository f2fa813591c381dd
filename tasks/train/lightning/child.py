"""Child process that imports the user's code: `python -P -m paceline.tasks.train.lightning.child`.

It reads directories, one in each line of its input. It carries out the `request.json` in each of them, writes
`answer.json` there, and then the name of the directory to its output. The processes of the flow and of Dask never
import the user's code.
"""

import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from paceline.conf.hints import fault_and_hint
from paceline.tasks.errors import InputError, RunError, one_line
from paceline.tasks.records.record import Record
from paceline.tasks.train.launch.fork_server import ENDED, ForkServer
from paceline.tasks.train.launch.standby import PARENT, die_with_supervisor
from paceline.tasks.train.user_code import find_user_error

OUTPUT = "output.txt"  # what the user's code prints, in the directory of its request
WRAPPED = ("ckpt_path", "weights_only")
"""Settings of `main.py fit` in a file that LightningCLI saved; they belong to no class."""
IMPORTING, CREATING = "importing your code", "creating your classes"


class Request(Record):
    """What the child does: `parse` and `predict` read and check a configuration, `prepare` runs `prepare_data`.

    `partitions` lists the keys of the data's partitions, with the code and the settings that they depend on.
    `partition` prepares one of them.
    """

    task: Literal["parse", "predict", "prepare", "partitions", "partition"]
    code: str | None = None  # directory that is imported from first
    file: str | None = None  # of LightningCLI, to parse
    ckpt_path: str | None = None  # in place of the file's; empty or null for none
    cli: str | None = None  # class path of the user's subclass of LightningCLI, in place of the settings'
    settings: dict[str, Any] = Field(default_factory=dict)  # to prepare, to predict with, or to parse without a file
    variants: tuple[tuple[str, ...], ...] = ()  # lists of overrides, each to parse with the file or the settings
    data: tuple[str, ...] | None = None  # paths of data in the directory of code; None for those of each variant
    host_index: int = 0
    partition: str = ""  # key of the one to prepare, into a directory
    directory: str = ""


class Child:
    """A child process, for one request after the other; the user's code is imported once.

    With a fork server, this is the process that the server has forked. It ends when its input is closed.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server
        if server is not None:
            self._process = server.process
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            env=os.environ | {PARENT: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Request, meanwhile: Callable[[], None] | None = None) -> dict[str, Any]:
        """Do a request; `meanwhile` is called in this process.

        Raises InputError: the request is wrong; RunError: the user's code failed.
        """
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
            with suppress(BrokenPipeError):
                orders.write(f"{directory}\n")
                orders.flush()
            if meanwhile is not None:
                meanwhile()
            line = answers.readline()
            if line != f"{directory}\n":
                status = line.removeprefix(ENDED).strip() if line else self._process.wait()
                output = Path(directory) / OUTPUT
                said = output.read_text(encoding="utf-8", errors="replace")[-500:] if output.exists() else ""
                raise RunError(f"the process that imports your code ended with status {status}: {said}")
            answer: dict[str, Any] = json.loads((Path(directory) / "answer.json").read_text(encoding="utf-8"))
        if answer.get("fault"):
            kind = InputError if answer["is_input"] else RunError
            raise kind(answer["fault"], hint=answer["hint"], setting=answer.get("setting"))
        return answer

    def close(self) -> None:
        """End the process; that of a fork server ends after its request."""
        if self._server is not None:
            for end in filter(None, (self._process.stdin, self._process.stdout)):
                with suppress(BrokenPipeError):
                    end.close()
            return
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # of a request that nobody has read
            pass


_waiting: list[Child] = []


def ask(
    request: Request, meanwhile: Callable[[], None] | None = None, server: ForkServer | None = None
) -> dict[str, Any]:
    """Do a request in a child process, or in that of a fork server; `meanwhile` is called in this one.

    If `meanwhile` is given and the module prepares data, the process stays. `ask_again` uses it without another import.

    Raises InputError: the request is wrong; RunError: the user's code failed.
    """
    with ExitStack() as stack:
        child = Child(server)
        stack.callback(child.close)
        answer = child.ask(request, meanwhile)
        if meanwhile is not None and any(one["prepares_data"] for one in answer.get("variants", ())):
            stack.pop_all()
            _waiting.append(child)
        return answer


def ask_again(request: Request) -> dict[str, Any]:
    """Do a request in the process that `ask` has left, or else in a new one; raises as `ask`."""
    with closing(_waiting.pop() if _waiting else Child()) as child:
        return child.ask(request)


def close_waiting() -> None:
    """End the process that `ask` has left, if `ask_again` has not."""
    while _waiting:
        _waiting.pop().close()


def _do(request: Request, note_stage: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """Do a request, and note what is being done before it can fail."""
    from paceline.tasks.train.lightning import code
    from paceline.tasks.train.lightning.cli import (
        ModuleCLI,
        check_module,
        check_prediction,
        has_partitions,
        instantiate_data,
        partition_keys,
        with_classes,
    )

    directory = Path(request.code) if request.code else None
    code.import_from(directory)
    if request.task == "prepare":
        note_stage(CREATING)
        cli = ModuleCLI(request.settings)
        trainer: Any = cli.trainer  # its type does not show the data
        trainer.datamodule = cli.datamodule
        note_stage("prepare_data")
        for owner in filter(None, (cli.datamodule, cli.model)):
            owner.trainer = trainer
            if request.host_index == 0 or owner.prepare_data_per_node:
                owner.prepare_data()
        return {}
    if request.task == "partitions":
        digest = code.source_digest(request.settings["data"], directory)  # before what else is imported
        note_stage(CREATING)
        data = instantiate_data(request.settings)
        note_stage("partitions")
        settings = code.with_absolute_paths(request.settings["data"])
        return {"keys": partition_keys(data), "code": digest, "data": settings}
    if request.task == "partition":
        note_stage(CREATING)
        data = instantiate_data(request.settings)
        note_stage(f"prepare_partition({request.partition!r})")
        data.prepare_partition(request.partition, Path(request.directory))
        return {}
    tree = request.settings if request.file is None else _settings_in(request.file)
    checkpoint = tree.get("ckpt_path") if request.ckpt_path is None else request.ckpt_path
    checkpoint = None if checkpoint in ("", "null") else checkpoint
    if checkpoint is not None:
        _check_checkpoint(checkpoint, is_resumed=request.task == "parse")
    own = request.cli or tree.get("cli")
    own = own["class_path"] if isinstance(own, dict) else own
    tree = {key: value for key, value in tree.items() if key not in (*WRAPPED, "cli")}
    variants = []
    for overrides in request.variants:
        named = with_classes(tree, overrides)
        options = [*(["--config", "{}"] if named else []), *(f"--{each}" for each in overrides)]
        cli = ModuleCLI(options, own=own, only_parse=True, content=named, file=request.file)
        settings = cli.settings()
        if request.task == "predict":
            check_prediction(settings)
        facts: dict[str, Any] = {"prepares_data": request.task == "parse" and check_module(settings)}
        facts |= {"has_partitions": has_partitions(settings), "averages": cli.averages()}
        packages = code.identities(settings, directory, request.data)
        parsed = {"settings": settings, "given": cli.given(options), "packages": packages}
        variants.append(parsed | facts)
    return {"variants": variants, "ckpt_path": checkpoint}


def _settings_in(file: str) -> dict[str, Any]:
    """The settings of a file of LightningCLI. Raises InputError: it has none, or its trainer has no arguments."""
    from jsonargparse import get_loader

    tree = get_loader("yaml")(Path(file).read_text(encoding="utf-8"))
    if isinstance(tree, dict):
        tree = tree.get("fit", tree)
    if isinstance(tree, dict) and tree.get("trainer", {}) is None:  # all lines of the section are comments
        tree = {key: value for key, value in tree.items() if key != "trainer"}
    if not isinstance(tree, dict) or not tree:
        hint = "add the section of your model: model: {class_path: acme.lit.Tagger}"
        raise InputError(f"{file} has no settings", hint=hint, setting="file")
    if not isinstance(trainer := tree.get("trainer", {}), dict | str):  # a text is the name of a file
        hint = "give the arguments of the Trainer, for example trainer: {max_epochs: 10}"
        raise InputError(f"trainer={trainer!r} has no names of arguments", hint=hint, setting="trainer")
    return tree


def _check_checkpoint(given: str, *, is_resumed: bool) -> None:
    """Raise InputError: a training cannot start from this file, or a prediction cannot use it."""
    import torch

    if "://" in given:
        fault = f"ckpt_path={given} is a URL: remote checkpoints are not supported here"
        raise InputError(fault, hint="download it and give its path: ckpt_path=last.ckpt", setting="ckpt_path")
    path = Path(given)
    hint = "give a file that Lightning's Trainer saved, for example ckpt_path=checkpoints/last.ckpt"
    if not path.is_file():
        raise InputError(f"ckpt_path={path} is not a file", hint=hint, setting="ckpt_path")
    if not zipfile.is_zipfile(path):
        raise InputError(f"ckpt_path={path} is damaged, or no checkpoint", hint=hint, setting="ckpt_path")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        fault = f"ckpt_path={path} holds objects that only code can load ({one_line(error).partition('. ')[0]})"
        raise InputError(fault, hint="save it with trainer.save_checkpoint and plain values alone") from error
    except (RuntimeError, OSError) as error:
        raise InputError(f"ckpt_path={path} cannot be read ({one_line(error)})", hint=hint) from error
    needed = {"state_dict", "loops", "optimizer_states"} if is_resumed else {"state_dict"}
    if not isinstance(content, dict) or not needed <= content.keys():
        raise InputError(f"ckpt_path={path} is no checkpoint of a training: it has weights at most", hint=hint)


def main() -> None:
    """Answer requests until nobody asks any more. The user's code has no input, and prints into a file."""
    die_with_supervisor()
    gc.disable()  # searching the imported modules for garbage takes a quarter of the time
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in orders:
        directory = Path(line.rstrip("\n"))
        output = os.open(directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for place in (1, 2):
            os.dup2(output, place)
        os.close(output)
        _answer(directory)
        sys.stdout.flush()
        answers.write(line)
        answers.flush()
        gc.freeze()
        gc.enable()


def _refusal(request: Request, error: BaseException, stage: str) -> dict[str, Any]:
    """The answer that names an error, and where the user's code raised it in this stage."""
    if isinstance(error, InputError):
        fault, hint = fault_and_hint(error)
        return {"fault": fault, "hint": hint, "setting": error.setting, "is_input": True}
    is_input = request.task in ("parse", "predict")
    if (found := find_user_error(error)) is not None:
        return {"fault": f"{stage} raised {found}", "hint": found.hint, "is_input": is_input}
    doing = "reading your settings" if stage == IMPORTING else stage
    return {
        "fault": f"{doing} raised {type(error).__name__} ({one_line(error)})",
        "hint": "correct the setting that this error is about",
        "is_input": is_input or stage == CREATING,
    }


def _answer(directory: Path) -> None:
    request = Request.model_validate_json((directory / "request.json").read_text(encoding="utf-8"))
    if request.task not in ("parse", "predict"):  # others call methods of the user's, which may leave garbage
        gc.enable()
    stages = [IMPORTING]
    try:
        answer = _do(request, stages.append)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's code raises
        answer = _refusal(request, error, stages[-1])
    (directory / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)
