"""Hooks and defaults of a user's own LightningCLI, and special values of arguments, compared with a script."""

import json
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LightningCLI
from torch.nn.utils.prune import L1Unstructured

from paceline.tasks.errors import InputError
from paceline.tasks.train.lightning.cli import ModuleCLI

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice

HERE = __name__
FIT = {"trainer": {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}}


class Net(LightningModule):
    """Has an argument with a default."""

    def __init__(self, hidden: int = 4, depth: int = 1) -> None:
        super().__init__()
        self.hidden, self.depth = hidden, depth


class Numbers(LightningDataModule):
    """Has an argument with a default."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.width = width


class Changing(LightningCLI):
    """Changes settings in a hook."""

    def before_instantiate_classes(self) -> None:
        """Change two settings of `fit`."""
        if self.subcommand == "fit":
            self.config.fit.trainer.max_epochs = 2
        self.config[self.subcommand].seed_everything = 5
        assert self.config.fit.ckpt_path is None
        if isinstance(self, ModuleCLI):
            assert "max_epochs: 2" in self.parser.dump(self.config)

    def before_fit(self) -> None:
        """Look at the settings as text."""
        assert "max_epochs: 2" in self.parser.dump(self.config)


class Replacing(LightningCLI):
    """Replaces the settings in a hook."""

    def before_instantiate_classes(self) -> None:
        """Change two settings of a copy."""
        self.config = self.config.clone()
        self.config.fit.trainer.max_epochs = 2
        self.config.fit.seed_everything = 5


class Flat(LightningCLI):
    """Changes settings in a hook, as a script without subcommands does."""

    def before_instantiate_classes(self) -> None:
        """Change two settings."""
        self.config.trainer.max_epochs = 2
        self.config.seed_everything = 5


class Defaults(LightningCLI):
    """Has other defaults than its classes."""

    def add_arguments_to_parser(self, parser) -> None:
        """Set a default of each section."""
        parser.set_defaults({"model.hidden": 7, "trainer.max_epochs": 3}, **{"data.width": 9})


class Linked(LightningCLI):
    """Links from arguments that have defaults."""

    def add_arguments_to_parser(self, parser) -> None:
        """Link both arguments of the model, and have a default of the data."""
        parser.add_argument("--size", type=int, default=3)
        parser.link_arguments("size", "model.hidden")
        parser.link_arguments(("size", "trainer.max_epochs"), "model.depth", compute_fn=lambda *given: given.count(3))
        parser.set_defaults({"data.width": 9})


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """LightningCLI warns of the arguments of pytest; a script's `fit` trains nothing here."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda self, subcommand: None)


def parse(own, *arguments, content=None):
    """The settings of a command line of its own, and the ModuleCLI of a rank with them."""
    named = (f"--model={HERE}.Net", f"--data={HERE}.Numbers")
    options = [*named, *(["--config", "{}"] if content else []), *arguments]
    settings = ModuleCLI(options, own=f"{HERE}.{own}", only_parse=True, content=content).settings()
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    return settings, ModuleCLI(settings, quiet)


@pytest.mark.parametrize("own", ["Changing", "Replacing", "Flat"])
def test_a_hook_before_the_classes_changes_the_settings_as_in_its_script(own):
    settings, rank = parse(own)
    assert (settings["seed_everything"], settings["trainer"]["max_epochs"]) == (5, 2)
    assert (rank.trainer.max_epochs, rank.config.seed_everything, rank.subcommand) == (2, 5, None)
    assert {"fit", "subcommand", "ckpt_path"}.isdisjoint(vars(rank.config))
    if own == "Changing":
        rank.run_hook("before_fit")
        script = Changing(Net, Numbers, args={"subcommand": "fit", "fit": FIT}, save_config_callback=None)
        assert (script.trainer.max_epochs, script.config.fit.seed_everything) == (2, 5)


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ({}, None),
        ({"model.depth": 3}, None),
        ({"model.hidden": 5, "data.width": 4}, None),
        ({"model.hidden": 5}, {"model": {"class_path": f"{HERE}.Net", "init_args": {"hidden": 6, "depth": 2}}}),
        ({}, {"model": {"class_path": f"{HERE}.Net", "init_args": {"depth": 2}}}),
        ({}, {"data": {"class_path": f"{HERE}.Numbers", "init_args": {"width": 1}}}),
    ],
)
def test_defaults_of_a_command_line_of_its_own_are_those_of_its_script(arguments, content):
    options = [f"--{key}={value}" for key, value in arguments.items()]
    settings, rank = parse("Defaults", *options, content=content)
    script_args = {section: dict(each["init_args"]) for section, each in (content or {}).items()}
    for key, value in arguments.items():
        section, name = key.split(".")
        script_args.setdefault(section, {})[name] = value
    script = Defaults(Net, Numbers, args={"subcommand": "fit", "fit": FIT | script_args}, save_config_callback=None)
    expected = script.model.hidden, script.model.depth, script.datamodule.width, script.trainer.max_epochs
    assert (rank.model.hidden, rank.model.depth, rank.datamodule.width, rank.trainer.max_epochs) == expected
    assert settings["model"]["init_args"] == {"hidden": expected[0], "depth": expected[1]}


@pytest.mark.parametrize(("own", "trainer"), [({}, {}), ({"size": 5}, {}), ({"size": 6}, {"max_epochs": 3})])
def test_links_from_arguments_with_defaults_are_those_of_its_script(own, trainer):
    options = [f"--{key}={value}" for key, value in own.items()]
    options += [f"--trainer.{key}={value}" for key, value in trainer.items()]
    settings, rank = parse("Linked", *options)
    fit = own | {"trainer": FIT["trainer"] | trainer}
    script = Linked(Net, Numbers, args={"subcommand": "fit", "fit": fit}, save_config_callback=None)
    expected = {"hidden": script.model.hidden, "depth": script.model.depth}
    assert (settings["model"]["init_args"], settings["data"]["init_args"]) == (expected, {"width": 9})
    assert (rank.model.hidden, rank.model.depth, rank.datamodule.width) == (*expected.values(), 9)


LABELS = {0: "a"}


class Special(LightningModule):
    """Has values that JSON changes."""

    def __init__(  # noqa: PLR0917  LightningCLI names them all
        self,
        high: float = math.inf,
        low: float | None = -math.inf,
        none: Any = math.nan,
        limits: list[float] | None = None,
        plain: dict = LABELS,
        nested: dict[str, Any] = {"a": [{1: "b"}], "c": {"d": math.inf}},  # noqa: B006
        labels: dict[int, str] | None = None,
        deep: dict[str, dict[int, float]] | None = None,
        free: dict | None = None,
        word: str = ".inf",
    ) -> None:
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


def arguments_of(init_args, *arguments, owner="Special"):
    """The arguments of the module in a rank, with those of a file and of the command line."""
    content = {"model": {"class_path": f"{HERE}.{owner}", "init_args": init_args}}
    cli = ModuleCLI(["--config", "{}", *arguments], only_parse=True, content=content)
    settings = json.loads(json.dumps(cli.settings(), allow_nan=False))
    again = ModuleCLI(["--config", "{}"], only_parse=True, content=settings).settings()
    assert again == settings, "as a configuration that is read again"
    json.dumps(cli.given(["--config", "{}"]), allow_nan=False)
    return ModuleCLI(settings, FIT["trainer"]).model.given


@pytest.mark.parametrize(
    ("init_args", "arguments", "expected"),
    [
        ({}, (), {}),
        ({"high": -math.inf, "low": math.nan, "none": math.inf}, (), {}),
        (
            {"limits": [1.0, math.inf]},
            ("--model.none=-.inf", "--model.high=.nan"),
            {"none": -math.inf, "high": math.nan},
        ),
        ({"labels": {0: "cat", 1: "dog"}, "deep": {"a": {3: math.inf}}}, (), {}),
        ({}, ("--model.labels={2: cat}",), {"labels": {2: "cat"}}),
        ({"free": {"a": 1, "b": [None, {"c": 2.5}]}}, (), {}),
    ],
)
def test_arguments_that_json_would_change_arrive_as_in_a_script(init_args, arguments, expected):
    plain = Special(**init_args | expected).given
    assert repr(arguments_of(init_args, *arguments)) == repr(plain)


@pytest.mark.parametrize("value", [{0: "cat"}, {"a": [{1: "b"}]}, {"a": {"b": math.inf}}, {True: 1}])
def test_given_values_that_cannot_arrive_unchanged_are_refused(value):
    with pytest.raises(InputError, match=r"model\.init_args\.free=.* would change") as refused:
        arguments_of({"free": value})
    assert refused.value.setting == "model.init_args.free"
    assert "dict[int, str]" in refused.value.hint


class Size(Enum):
    """Members by name."""

    SMALL = 1
    LARGE = 2


class Pair(NamedTuple):
    """Has a value without type."""

    first: int = 1
    second: Any = None


DEVICE = torch.device("cpu")


class Step:
    """Has an object as a default."""

    def __init__(self, scale: Any = 1, device: Any = DEVICE) -> None:
        self.scale, self.device = scale, device

    def __repr__(self) -> str:
        return f"Step({self.scale!r}, {self.device!r})"


PAIR = Pair()


class Texts(LightningModule):
    """Has arguments that may be a callable or a plain value, and arguments without type."""

    def __init__(  # noqa: PLR0917  LightningCLI names them all
        self,
        loss: Callable | str = "ce",
        metric: Callable | str | None = None,
        rate: Callable | float = 0.5,
        losses: dict[str, Callable | str] = {"a": "ce"},  # noqa: B006
        layers: Callable | tuple[int, ...] | list[str] = (),
        size: Callable | Size = Size.SMALL,
        pause: Callable | timedelta = timedelta(1),
        free=None,
        several: list[Any] = [],  # noqa: B006
        nested: dict[str, Any] = {},  # noqa: B006
        pair: Pair = PAIR,
        steps: tuple[Step, ...] = (),
        constant: Any = (1, Size.SMALL),
    ) -> None:
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


def arguments_of_script(init_args, *arguments, owner="Texts"):
    """The arguments of the module in a script with LightningCLI."""
    content = json.dumps(FIT | {"model": {"class_path": f"{HERE}.{owner}", "init_args": init_args}})
    options = {"subclass_mode_model": True, "run": False, "save_config_callback": None}
    return LightningCLI(LightningModule, Numbers, args=["--config", content, *arguments], **options).model.given


@pytest.mark.parametrize(
    ("init_args", "arguments"),
    [
        ({}, ()),
        ({"loss": "mse", "metric": "l1", "rate": 0.7, "losses": {"a": "mse", "b": "torch.relu"}}, ()),
        ({"loss": "torch.relu", "metric": None, "rate": 2, "losses": {}, "layers": [3, 4], "size": "LARGE"}, ()),
        ({"layers": ["12", "x"]}, ("--model.loss=mse", "--model.rate=1e-3", "--model.losses.b=l1")),
        ({"free": {"a": "12", "b": ["true", {"c": "null"}], "d": "[1, 2]", "e": '"1"', "f": "1.5"}}, ()),
        (
            {"several": ["12", ["12"], {"a": "no"}], "nested": {"a": "1", "b": {"c": "1"}}, "pair": {"second": ["1"]}},
            (),
        ),
        ({"steps": [{"class_path": f"{HERE}.Step", "init_args": {"scale": {"a": "12"}}}]}, ()),
        ({}, ('--model.free="12"', "--model.several=['12', 12]", '--model.nested={"a": {"b": "12"}}')),
        ({}, ("--model.free=12", "--model.several+=12", '--model.nested.a="12"')),
    ],
)
def test_texts_and_plain_values_arrive_as_in_a_script(init_args, arguments):
    rank = arguments_of(init_args, *arguments, owner="Texts")
    assert repr(rank) == repr(arguments_of_script(init_args, *arguments))


def test_a_file_that_names_another_file_has_its_settings_too_as_in_a_script(tmp_path):
    other = {"seed_everything": 5, "trainer": FIT["trainer"] | {"max_epochs": 9}}
    content = {"config": "other.yaml", "model": {"class_path": f"{HERE}.Net"}, "seed_everything": 3}
    (tmp_path / "other.yaml").write_text(json.dumps(other))
    (tmp_path / "main.yaml").write_text(json.dumps(content))
    file = str(tmp_path / "main.yaml")
    settings = ModuleCLI(["--config", "{}"], only_parse=True, content=content, file=file).settings()
    options = {"subclass_mode_model": True, "run": False, "save_config_callback": None}
    script = LightningCLI(LightningModule, Numbers, args=["--config", file], **options)
    expected = script.trainer.max_epochs, script.config.seed_everything
    assert (settings["trainer"]["max_epochs"], settings["seed_everything"]) == expected == (9, 3)
    assert "config" not in settings


class Methods(LightningModule):
    """Has arguments with names of methods of a Namespace, and with other names that LightningCLI uses itself."""

    def __init__(
        self,
        keys: tuple[str, ...] = ("image",),
        values: dict | None = None,
        items: dict | float = math.inf,
        clone: Callable = torch.relu,
        fit: bool = True,
        subcommand: str | None = None,
        dict_kwargs: dict = {},  # noqa: B006
        config: Callable | timedelta = timedelta(1),
    ) -> None:
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


@pytest.mark.parametrize(
    ("init_args", "arguments"),
    [
        ({}, ()),
        ({"keys": ["12", "b"], "values": {"a": "12", "b": {"keys": 1}}, "items": 0.5}, ()),
        ({"values": {}}, ("--model.keys=['b']", "--model.items={c: 2}", "--model.clone=torch.tanh")),
        ({"fit": False, "subcommand": "fit"}, ()),
        ({}, ("--model.fit=false", "--model.subcommand=x")),
        ({"dict_kwargs": {"a": 1}}, ()),
        ({"config": "torch.relu"}, ()),
    ],
)
def test_arguments_with_names_that_lightning_uses_itself_arrive_as_in_a_script(init_args, arguments):
    rank = arguments_of(init_args, *arguments, owner="Methods")
    assert repr(rank) == repr(arguments_of_script(init_args, *arguments, owner="Methods"))


def test_a_changed_value_with_the_name_of_a_method_is_refused():
    with pytest.raises(InputError, match=r"model\.init_args\.values=.* would change") as refused:
        arguments_of({"values": {0: "cat"}}, owner="Methods")
    assert refused.value.setting == "model.init_args.values"


@pytest.mark.parametrize(("owner", "name"), [("Texts", "pause"), ("Methods", "config")])
def test_a_given_value_that_cannot_be_written_is_refused(owner, name):
    with pytest.raises(InputError, match=rf"model\.init_args\.{name}=.* is an object") as refused:
        arguments_of({name: "2:00:00"}, owner=owner)
    assert refused.value.setting == f"model.init_args.{name}"


def test_a_function_that_a_callback_takes_by_name_arrives():
    pruning = {"class_path": "ModelPruning", "init_args": {"pruning_fn": "l1_unstructured", "amount": 0.2}}
    content = {"trainer": {"callbacks": [pruning]}}
    settings = ModuleCLI(["--config", "{}", f"--model={HERE}.Net"], only_parse=True, content=content).settings()
    (pruning,) = (
        each for each in ModuleCLI(settings, FIT["trainer"]).trainer.callbacks if isinstance(each, ModelPruning)
    )
    assert pruning.pruning_fn is L1Unstructured
