"""The child process that imports the user's code: once for all its requests, and named when it ends."""

import psutil
import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.train.lightning import child

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")

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
