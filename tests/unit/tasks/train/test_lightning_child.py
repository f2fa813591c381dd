"""The child process that imports the user's code: once for all its requests, and named when it ends."""

import json
import sys

import psutil
import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.train.lightning import child
from tests.support.refusals import refused

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice

CODE = """
import os
from pathlib import Path

import lightning.pytorch as pl


def note(word):
    with (Path(__file__).parent / "seen.txt").open("a") as file:
        print(word, os.getpid(), file=file)


note("imported")


class Module(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return None

    def train_dataloader(self):
        return []

    def configure_optimizers(self):
        return None

    def prepare_data(self):
        note("prepared")
        input_is_empty = not os.read(0, 1)
        assert input_is_empty
        print("goodbye")
        if self.logger_name == "end":
            os._exit(3)

    def __init__(self, logger_name: str = "log"):
        super().__init__()
        self.logger_name = logger_name


class Data(pl.LightningDataModule):
    def prepare_data(self):
        assert self.trainer.datamodule is self
        note(f"{self.trainer.max_epochs}-epochs")


class Epochs(Module):
    def prepare_data(self):
        note(f"{self.trainer.max_epochs}-epochs")
"""
END = "raise SystemExit(2)"  # as argparse does, at the top of a module
FAULTY = """
import lightning.pytorch as pl


class Module(pl.LightningModule):
    def __init__(self, is_wrong: bool = False):
        super().__init__()
        if is_wrong:
            raise LookupError("in __init__")

    def prepare_data(self):
        raise LookupError("in prepare_data")


class Data(pl.LightningDataModule):
    def __init__(self, is_wrong: bool = False):
        super().__init__()
        if is_wrong:
            raise LookupError("in __init__")

    def partitions(self):
        raise LookupError("in partitions")

    def prepare_partition(self, key, directory):
        raise LookupError("in prepare_partition")
"""


@pytest.fixture
def code(tmp_path):
    """A directory of code."""
    (tmp_path / "lit.py").write_text(CODE)
    return tmp_path


def parse(code, *overrides):
    """The settings, parsed by a process that stays."""
    variants = (("model.class_path=lit.Module", *overrides),)
    answer = child.ask(child.Request(task="parse", code=str(code), variants=variants), meanwhile=lambda: None)
    return answer["variants"][0]["settings"]


def seen(code):
    return [line.split() for line in (code / "seen.txt").read_text().splitlines()]


def test_the_process_that_has_read_the_settings_prepares_the_data(code):
    request = child.Request(task="prepare", code=str(code), settings=parse(code))
    assert child.ask_again(request) == {}
    (imported, first), (prepared, second) = seen(code)
    assert (imported, prepared) == ("imported", "prepared")
    assert first == second
    assert not psutil.pid_exists(int(first))


def test_the_preparation_reads_the_trainer(code):
    overrides = ("model.class_path=lit.Epochs", "data.class_path=lit.Data", "trainer.max_epochs=4")
    request = child.Request(task="prepare", code=str(code), settings=parse(code, *overrides))
    assert child.ask_again(request) == {}
    assert [word for word, _ in seen(code)] == ["imported", "4-epochs", "4-epochs"]


@pytest.mark.slow
def test_without_a_process_that_stayed_another_one_prepares(code):
    settings = parse(code)
    request = child.Request(task="prepare", code=str(code), settings=settings)
    assert child.ask_again(request) == child.ask_again(request) == {}
    assert len({pid for _, pid in seen(code)}) == 2


@pytest.mark.slow
def test_a_process_that_ends_is_named_with_what_it_printed(code):
    request = child.Request(task="prepare", code=str(code), settings=parse(code, "model.init_args.logger_name=end"))
    with pytest.raises(RunError, match="ended with status 3"):
        child.ask_again(request)


@pytest.mark.slow
def test_nothing_stays_without_a_run_that_follows(code):
    variants = (("model.class_path=lit.Module",),)
    child.ask(child.Request(task="parse", code=str(code), variants=variants))
    assert not psutil.pid_exists(int(seen(code)[0][1]))


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """The answer to a request about code that fails, in this process."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    for name, text in {
        "unfinished": "class Net(:",
        "indirect": "import unfinished",
        "divides": "1 / 0",
        "ends": END,
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # of which LightningCLI warns
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def ask(task, **request):
        request = child.Request(task=task, directory=str(tmp_path), **request)
        (tmp_path / "request.json").write_text(request.model_dump_json())
        child._answer(tmp_path)
        return json.loads((tmp_path / "answer.json").read_text())

    yield ask
    for name in ("faulty", "unfinished", "indirect", "divides", "ends"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("task", "section", "stage"),
    [
        ("prepare", "model", "prepare_data"),
        ("partitions", "data", "partitions"),
        ("partition", "data", "prepare_partition('a')"),
    ],
)
@pytest.mark.parametrize("is_wrong", [True, False])
def test_an_error_is_named_with_what_was_done_and_the_line_of_the_user(
    answer, tmp_path, task, section, stage, is_wrong
):
    class_path = f"faulty.{ {'model': 'Module', 'data': 'Data'}[section] }"
    given = {section: {"class_path": class_path, "init_args": {"is_wrong": is_wrong}}}
    found = answer(task, partition="a", settings={"model": {"class_path": "faulty.Module"}} | given)
    text, doing = ("in __init__", "creating your classes") if is_wrong else (f"in {stage.partition('(')[0]}", stage)
    start, end = (FAULTY.index(f"class {class_path.partition('.')[2]}"), f'"{text}"')
    line = FAULTY[: FAULTY.index(end, start)].count("\n") + 1
    assert found["fault"] == f"{doing} raised LookupError ({text}) in {tmp_path / 'faulty.py'}, line {line}"
    assert (found["hint"], found["is_input"]) == ("fix faulty.py", False)


@pytest.mark.parametrize(
    ("module", "error", "file"),
    [
        ("unfinished", "SyntaxError", "unfinished.py"),
        ("indirect", "SyntaxError", "unfinished.py"),
        ("divides", "ZeroDivisionError", "divides.py"),
        ("ends", "SystemExit", "ends.py"),
    ],
)
def test_code_that_cannot_be_imported_is_named_with_its_line(answer, tmp_path, module, error, file):
    found = answer("parse", variants=((f"model.class_path={module}.Net",),))
    assert found["fault"].startswith(f"importing your code raised {error} (")
    assert found["fault"].endswith(f" in {tmp_path / file}, line 1")
    assert (found["hint"], found["is_input"]) == (f"fix {file}", True)


def test_an_error_of_lightning_about_a_setting_names_no_file(answer):
    settings = {"seed_everything": -5, "model": {"class_path": "faulty.Module"}}
    for task in ("parse", "prepare"):
        found = answer(task, settings=settings, variants=((),))
        assert "ValueError (-5 is not in bounds" in found["fault"]
        assert "setting" in found["hint"]
        assert ".py" not in found["fault"] + found["hint"]
        assert found["is_input"]


@pytest.mark.parametrize("text", ["", "fit:\n", "fit: {}\n", "trainer:\n", "fit:\n  trainer:\n", "- model\n"])
def test_a_file_without_settings_is_refused(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with refused("file", file):
        child._do(child.Request(task="parse", file=str(file)))


@pytest.mark.parametrize(
    "text", ["trainer: [1]\n", "fit:\n  trainer: 3\n", "trainer: false\nmodel: {class_path: a.B}\n"]
)
def test_a_section_of_the_trainer_that_names_no_arguments_is_refused(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with refused("trainer", "max_epochs"):
        child._do(child.Request(task="parse", file=str(file)))


@pytest.mark.parametrize("text", ["trainer:\nseed_everything: 3\n", "fit:\n  trainer:\n  seed_everything: 3\n"])
def test_a_section_of_the_trainer_without_lines_counts_as_absent(answer, tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    classes = "model.class_path=lightning.pytorch.demos.boring_classes.BoringModel"
    variants = ((classes,), (classes, "trainer.max_epochs=2"))
    first, second = answer("parse", file=str(file), variants=variants)["variants"]
    assert (first["settings"]["trainer"], second["settings"]["trainer"]) == ({}, {"max_epochs": 2})
    assert first["settings"]["seed_everything"] == 3
