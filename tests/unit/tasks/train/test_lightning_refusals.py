"""What a user reads when settings do not fit the classes: of each form in which jsonargparse refuses them."""

import sys
from enum import Enum
from typing import Literal

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn

from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning.cli import ModuleCLI
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of Lightning and jsonargparse

HERE = __name__
CPU = torch.device("cpu")
ELSEWHERE = "check its name, install its package, or give the directory that holds it: --code DIR"


@pytest.fixture(autouse=True)
def _without_arguments(monkeypatch):
    """LightningCLI warns of those of pytest."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


class Size(Enum):
    """Members by name."""

    small = 1
    big = 2


class Tagger(LightningModule):
    """Has an argument of each kind."""

    def __init__(
        self,
        directory: str,
        width: int = 8,
        depth: int | None = None,
        kind: Literal["a", "b"] = "a",
        sizes: list[int] | None = None,
        size: Size = Size.small,
        rate: Literal["auto", "off"] | float = "auto",
        layer: nn.Module | None = None,
    ) -> None:
        super().__init__()


class Words(LightningDataModule):
    """Needs a directory."""

    def __init__(self, directory: str) -> None:
        super().__init__()


class Named(LightningDataModule):
    """Takes arguments of all names."""

    def __init__(self, **named: int) -> None:
        super().__init__()


class Inner:
    """Has an argument with the name of a section."""

    def __init__(self, model: int = 1) -> None:
        pass


class Outer(LightningModule):
    """Has a class as a default, in place of an instance."""

    def __init__(self, device: torch.device = CPU, model: Inner | None = None, layer: nn.Module = nn.ReLU) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("setting", "value", "fault"),
    [
        ("model.init_args.width", "wide", "=wide must be of type int"),
        ("model.init_args.depth", "deep", "=deep must be of type int or null"),
        ("model.init_args.kind", "c", "=c must be one of 'a', 'b'"),
        ("model.init_args.sizes", "[1, b]", "=[1, 'b'] must be of type list[int] or null"),
        ("model.init_args.size", "huge", "=huge must be one of small, big"),
        ("model.init_args.rate", "high", "=high must be one of 'auto', 'off' or float"),
        ("trainer.max_epochs", "many", "=many must be of type int or null"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_it_must_be(setting, value, fault):
    with pytest.raises(InputError) as refused:
        parse(f"--{setting}={value}")
    assert str(refused.value).startswith(f"{setting}{fault};")
    assert refused.value.setting == setting


@pytest.mark.parametrize(
    ("place", "argument", "owner", "hint"),
    [
        ("model", "widht", f"{HERE}.Tagger", "did you mean width?"),
        ("model.init_args.layer", "slope", "torch.nn.ReLU", "its arguments are: inplace"),
    ],
)
def test_an_argument_of_dict_kwargs_that_the_class_does_not_take_is_refused(place, argument, owner, hint):
    with pytest.raises(InputError) as refused:
        parse("--model.init_args.layer=torch.nn.ReLU", f"--{place}.dict_kwargs.{argument}=3")
    name = f"{place}.dict_kwargs.{argument}"
    assert str(refused.value).startswith(f"{name} is not an argument of ")
    assert owner.rpartition(".")[2] in str(refused.value)
    assert (refused.value.setting, refused.value.hint) == (name, hint)


def test_a_class_that_takes_all_arguments_takes_those_of_dict_kwargs():
    assert parse(f"--data={HERE}.Named", "--data.dict_kwargs.zz='1'")["data"]["dict_kwargs"] == {"zz": 1}


@pytest.mark.parametrize(
    ("arguments", "missing", "owner"),
    [
        ({"model": None}, ["model.init_args.directory"], f"{HERE}.Tagger"),
        ({"data": None}, ["data.init_args.directory"], f"{HERE}.Words"),
        (
            {"layer": "torch.nn.Linear"},
            [f"model.init_args.layer.init_args.{name}" for name in ("in_features", "out_features")],
            "torch.nn.Linear",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_class_and_can_be_pasted(arguments, missing, owner):
    given = {"model": "x", "data": "x"} | arguments
    directories = [f"--{key}.init_args.directory={given[key]}" for key in ("model", "data") if given[key]]
    layer = [f"--model.init_args.layer={given['layer']}"] if "layer" in given else []
    with pytest.raises(InputError) as refused:
        ModuleCLI([f"--model={HERE}.Tagger", f"--data={HERE}.Words", *directories, *layer], only_parse=True)
    text = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in the settings of {owner}"
    assert str(refused.value).startswith(text)
    assert refused.value.hint == "add " + " ".join(f"{name}=VALUE" for name in missing)


def test_all_choices_of_a_union_are_named():
    with pytest.raises(InputError) as refused:
        parse("--trainer.precision=bf16mixed")
    assert "'bf16-mixed'" in str(refused.value)
    assert "32, " in str(refused.value)


def test_a_class_of_another_kind_is_named_with_its_own_setting():
    with pytest.raises(InputError) as refused:
        parse(f"--model.init_args.layer={HERE}.Words")
    assert str(refused.value).startswith(f"model.init_args.layer.class_path={HERE}.Words is not a Module;")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (f"{HERE}.Taggr", f"use model.class_path={HERE}.Tagger"),
        (f"{HERE}.Unknown", f"name a class that {HERE} has"),
        (f"{HERE}s.Tagger", ELSEWHERE),
        ("nowhere.Net", ELSEWHERE),
        ("outdated.Net", "fix the code of outdated, or of what it imports"),
    ],
)
def test_a_class_that_cannot_be_imported_is_refused_with_what_helps(tmp_path, monkeypatch, path, hint):
    (tmp_path / "outdated.py").write_text("import json\n\njson.of_an_old_version\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as refused:
        parse(f"--model={path}")
    assert str(refused.value).startswith(f"model.class_path={path} cannot be imported (")
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("arguments", "setting", "data"),
    [
        (("model.init_args.width+=3",), "model.init_args.width", ["model.init_args.width=VALUE"]),
        (("trainer.max_epochs+=3",), "trainer.max_epochs", ["trainer.max_epochs=VALUE"]),
        (("model.init_args.widht+=3",), "model.init_args.widht", ["width?"]),
        (("trainer=fast",), "trainer", ["fast"]),
        (
            ("model.init_args.layer=torch.nn.ReLU", "model.init_args.layer.slope=1"),
            "model.init_args.layer.init_args.slope",
            ["inplace"],
        ),
        (
            ("model.init_args.layer=torch.nn.ReLUX",),
            "model.init_args.layer.class_path",
            ["model.init_args.layer.class_path=torch.nn.ReLU"],
        ),
    ],
)
def test_a_setting_that_is_refused_is_named(arguments, setting, data):
    with refused(setting, *data):
        parse(*(f"--{each}" for each in arguments))


@pytest.mark.parametrize(
    ("content", "setting"),
    [
        ({"data": {"class_path": f"{HERE}.Words", "directory": "x"}}, "data.directory"),
        ({"data": {"class_path": f"{HERE}.Words", "directory": "x", "init_args": {}}}, "data.directory"),
        (
            {"trainer": {"callbacks": [{"class_path": "EarlyStopping", "monitor": "loss"}]}},
            "trainer.callbacks.monitor",
        ),
        ({"trainer": {"logger": {"class_path": "CSVLogger", "save_dir": "x"}}}, "trainer.logger.save_dir"),
    ],
)
def test_an_argument_next_to_the_path_of_its_class_is_refused(content, setting):
    with refused(setting, "class_path", "init_args"):
        parse("--config", "{}", content=content)


@pytest.mark.parametrize(
    ("init_args", "setting", "data"),
    [
        ({"device": "cpu"}, "model.init_args.device", ["cpu"]),
        (
            {"model": {"class_path": f"{HERE}.Inner", "init_args": {"model": "x"}}},
            "model.init_args.model.init_args.model",
            ["model.init_args.model.init_args.model=x", "int"],
        ),
        ({}, "model.init_args.layer", ["torch.nn.modules.activation.ReLU"]),
    ],
)
def test_what_a_value_is_refused_for_is_shown(init_args, setting, data):
    model = {"class_path": f"{HERE}.Outer", "init_args": init_args}
    with refused(setting, *data):
        ModuleCLI(["--config", "{}"], only_parse=True, content={"model": model})


def parse(*arguments, content=None):
    """Read the settings of both classes with these arguments."""
    given = [f"--model={HERE}.Tagger", "--model.init_args.directory=x"]
    words = [f"--data={HERE}.Words", "--data.init_args.directory=x"]
    return ModuleCLI([*given, *words, *arguments], only_parse=True, content=content).settings()
