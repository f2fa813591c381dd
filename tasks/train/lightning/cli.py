"""The user's classes, as LightningCLI reads and instantiates them."""

import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

from paceline.tasks.errors import InputError, one_line
from paceline.tasks.files import TEMPORARY_SUFFIX
from paceline.tasks.records.data import PreparedPartitions
from paceline.tasks.train.lightning.plain_settings import (
    copied,
    refuse_objects,
    refuse_unknown,
    remove_changed,
    with_yaml_numbers,
    without_objects,
)
from paceline.tasks.train.refusals import own_refusals

Settings = dict[str, Any]
AVERAGES = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks that average whole weights."""
CLASSES = ("model", "data")
"""Sections of LightningCLI that are a class with its arguments."""
_FOLDER = re.compile(r"\w[\w.-]{0,199}", re.ASCII)


class _Parser(LightningArgumentParser):
    """Links arguments of `model` and `data` also as a LightningCLI does that has these classes in its code."""

    def __init__(self, *args: Any, content: Settings | None = None, file: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._content, self._file = content, file
        self.classes: list[Any] = []
        """Classes whose arguments are sections."""
        self._class_defaults: dict[str, Settings] = {}
        """Defaults of arguments of `model` and `data`, until their classes are known."""

    def parse_string(self, content: str, path: Any = "", **options: Any) -> Any:
        """The settings of a text; {} stands for `content`. Its paths start from the folder of `file`, as in a file."""
        if path or content != "{}" or self._content is None:  # of another configuration that `config` names
            return super().parse_string(content, path, **options)
        from jsonargparse import Namespace
        from jsonargparse import Path as FoundPath  # type: ignore[attr-defined]  # it is documented

        options.pop("_fail_no_subcommand", None)  # parse_object does not take it
        with FoundPath(self._file, mode="fr").relative_path_context() if self._file else nullcontext():
            parsed = self.parse_object(copy.deepcopy(self._content), **options)

        def make_absolute(value: Any) -> Any:
            if isinstance(value, FoundPath) and value.absolute != str(Path(str(value)).absolute()):
                return type(value)(value.absolute)
            if isinstance(value, dict | Namespace):
                items = vars(value) if isinstance(value, Namespace) else value
                items.update({name: make_absolute(each) for name, each in items.items()})
            return type(value)(map(make_absolute, value)) if type(value) in (list, tuple, set) else value

        return make_absolute(parsed)

    def add_lightning_class_args(self, lightning_class: Any, nested_key: str, *args: Any, **options: Any) -> list[str]:
        """Add the arguments of a class."""
        self.classes.append(lightning_class)
        return super().add_lightning_class_args(lightning_class, nested_key, *args, **options)

    def set_defaults(self, *args: Settings, **kwargs: Any) -> None:
        """Set defaults; those of arguments of `model` and `data` wait for `set_class_defaults`."""
        for given in (*args, kwargs):
            for key, default in given.items():
                if (of_class := _of_class(key)) == key:
                    super().set_defaults({key: default})
                else:
                    section, _, name = of_class.partition(".init_args.")
                    self._class_defaults.setdefault(section, {})[name] = default

    def dump(self, cfg: Any, *args: Any, **options: Any) -> str:
        """The settings as text, without `fit`: hooks of the user have it, and this parser does not know it.

        Parsers of the arguments of a class, which may have this name, have no sections.
        """
        if self.classes:
            sections = {name: value for name, value in vars(cfg).items() if name not in ("subcommand", "fit")}
            cfg = type(cfg)(**sections)
        text: str = super().dump(cfg, *args, **options)
        return text

    def read_named(self, arguments: Sequence[str] | Settings) -> Any:
        """The settings that arguments name, without the defaults of any class, some of which may be required.

        They have no values of links, whose sources may be such defaults.
        """
        from jsonargparse._link_arguments import skip_apply_links  # private, as of 4.53

        read: Any = self.parse_object if isinstance(arguments, dict) else self.parse_args
        named = dict(arguments) if isinstance(arguments, dict) else [*arguments]
        with skip_apply_links():
            return read(named, defaults=False, _skip_validation=True)

    def set_class_defaults(self, arguments: Sequence[str] | Settings) -> None:
        """Set the defaults of arguments of `model` and `data`, whose classes these arguments name."""
        if not self._class_defaults:
            return
        named = self.read_named(arguments)
        for section, defaults in self._class_defaults.items():
            if path := named.get(f"{section}.class_path"):
                super().set_defaults({section: {"class_path": path, "init_args": defaults}})

    def link_arguments(
        self,
        source: str | tuple[str, ...],
        target: str,
        compute_fn: Callable[..., Any] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Link arguments. Of data that are instantiated, a source is an attribute."""
        if apply_on == "parse":
            source = _of_class(source) if isinstance(source, str) else tuple(map(_of_class, source))
        super().link_arguments(source, _of_class(target), compute_fn, apply_on)


def _of_class(key: str) -> str:
    section, _, name = key.partition(".")
    is_whole = section not in CLASSES or name.partition(".")[0] in ("", "class_path", "init_args")
    return key if is_whole else f"{section}.init_args.{name}"


class ModuleCLI(LightningCLI):
    """LightningCLI for any module and data, without subcommands.

    `arguments` are those of its command line, or a configuration. `--config {}` stands for `content`, that of `file`.
    `own`, or `cli` of the configuration, is the path of the user's subclass of LightningCLI, whose links and arguments
    it has too. Raises InputError: they are wrong.
    """

    parser: _Parser
    own: str | None = None

    def __new__(cls, arguments: Sequence[str] | Settings, *args: Any, own: str | None = None, **options: Any) -> Self:
        """Create an instance that is one of the user's subclass too."""
        if isinstance(arguments, dict) and "cli" in arguments:
            own = arguments["cli"]["class_path"]
        made = cls if own is None else type(cls.__name__, (cls, _load_cli(own)), {"own": own})
        return object.__new__(made)

    def __init__(
        self,
        arguments: Sequence[str] | Settings,
        trainer: Settings | None = None,
        partitions: PreparedPartitions | None = None,
        *,
        own: str | None = None,
        only_parse: bool = False,
        content: Settings | None = None,
        file: str | None = None,
    ) -> None:
        self._options, self._partitions, self._only_parse = trainer or {}, partitions, only_parse
        self._given = arguments.get("trainer", {}) if isinstance(arguments, dict) else {}
        self._arguments: Any = arguments
        with own_refusals():
            super().__init__(
                args={key: value for key, value in arguments.items() if key != "cli"}
                if isinstance(arguments, dict)
                else list(arguments),
                run=False,
                save_config_callback=None,
                parser_class=_Parser,
                parser_kwargs={"exit_on_error": False, "content": content, "file": file},
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, with the defaults that the user's subclass gives to those of its classes."""
        self.parser.set_class_defaults(args)
        super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Call this hook of the user's subclass.

        It finds the settings under `fit`, as in `main.py fit`, and at the top level, as without subcommands.
        """
        parsed = dict(vars(self.config))
        self.config, self.subcommand = self._with_fit(self.config), "fit"
        super().before_instantiate_classes()
        self.subcommand, both = None, self.config  # which the hook may have replaced
        changed = {name: value for name, value in vars(both).items() if name in parsed and parsed[name] != value}
        self.config = type(both)(**{name: value for name, value in vars(both.fit).items() if name in parsed} | changed)

    def instantiate_classes(self) -> None:
        """Instantiate all classes, or none where only the settings are checked."""
        if not self._only_parse:
            super().instantiate_classes()
        if self._partitions is not None:
            self.datamodule.prepared_directory = self._partitions.directory

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Instantiate the trainer with the execution and the callbacks of Paceline, without progress bars."""
        given = self.config_init["trainer"]
        given["callbacks"] = _without_bars(given.get("callbacks"))
        own = _without_bars(self.trainer_defaults.get("callbacks"))  # of the user's subclass
        if self._options.get("enable_checkpointing") is False:  # an arm, or a prediction
            own, self.parser.callback_keys = [], []
        self.trainer_defaults = self.trainer_defaults | {"callbacks": [*own, *self._options.get("callbacks", [])]}
        # Where `int | float` was first imported as `float | int`, jsonargparse makes 1 batch 1.0: all batches.
        numbers = {name: value for name, value in self._given.items() if type(value) is int}
        options = {name: value for name, value in self._options.items() if name != "callbacks"}
        alone = {"plugins": [LightningEnvironment()]}  # else Lightning starts MPI: see `lightning_environment`
        return super().instantiate_trainer(**alone | numbers | options)

    def run_hook(self, name: str) -> None:
        """Call a hook of the user's subclass, if it defines it, with the attributes that `main.py fit` gives it.

        Arguments of `fit` itself, as `ckpt_path`, have their defaults.
        """
        if (hook := getattr(self, name, None)) is None:
            return
        if self.subcommand is None:
            self.subcommand = "fit"
            self.config, self.config_init = map(self._with_fit, (self.config, self.config_init))
        hook()

    def _with_fit(self, config: Any) -> Any:
        """The settings, and the same ones under `fit` as those of this subcommand."""
        arguments = inspect.signature(getattr(self.trainer_class, "fit", Trainer.fit)).parameters
        names = arguments.keys() - self.subcommands()["fit"] - {"self"}
        of_fit = {each: arguments[each].default for each in names}
        make = type(config)
        return make(**vars(config), subcommand="fit", fit=make(**of_fit | vars(config)))

    def given(self, arguments: Sequence[str]) -> Settings:
        """The settings that its arguments name, without the defaults of any class."""
        return self._dump(self.parser.read_named(arguments), skip_validation=True) | self._own()

    def settings(self) -> Settings:
        """All settings but those of the trainer that have their defaults.

        Raises InputError: a setting that the user has named would not reach the ranks unchanged, or no class takes it.
        """
        refuse_unknown(self.config, "")
        tree = self._dump(self.config, skip_link_targets=False)
        named = self.parser.read_named(self._arguments)
        refuse_objects(tree, self.config, named, "")
        unset = self.parser.get_defaults(skip_validation=True)
        defaults = self._dump(unset, skip_validation=True)["trainer"]
        trainer = tree.pop("trainer", {})
        given = {name: value for name, value in trainer.items() if value != defaults.get(name)}
        tree = {name: value for name, value in (tree | {"trainer": given}).items() if value is not None}
        with own_refusals():
            again = self.parser.parse_object(copy.deepcopy(tree))
        remove_changed(tree, self.config, again, named, "")
        return tree | self._own()

    def averages(self) -> str | None:
        """Name of the class of a callback that averages weights; None without one."""
        given = [load_class(each.class_path) for each in _several(self.config.trainer.callbacks)]
        given += [type(each) for each in _several(self.trainer_defaults.get("callbacks"))]
        classes = (each for each in (*given, *self.parser.classes) if isinstance(each, type))
        return next((each.__name__ for each in classes if issubclass(each, AVERAGES)), None)

    def _dump(self, config: Any, **options: Any) -> Settings:
        """Settings as plain values, without objects. As YAML, jsonargparse (4.53) would make the text 1e5 a number."""
        mode, self.parser.parser_mode = self.parser.parser_mode, "json"
        try:
            dumped: Settings = json.loads(self.parser.dump(copied(config), skip_unset=False, **options))
        finally:
            self.parser.parser_mode = mode
        plain: Settings = with_yaml_numbers(without_objects(dumped, config))
        return plain

    def _own(self) -> Settings:
        return {} if self.own is None else {"cli": {"class_path": self.own}}


def _several(callbacks: Any) -> list[Any]:
    """A callback, several or None as a list."""
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def _without_bars(callbacks: Any) -> list[Any]:
    """As `_several`, without progress bars."""
    return [each for each in _several(callbacks) if not isinstance(each, ProgressBar)]


def _load_cli(path: str) -> type:
    """The user's subclass of LightningCLI. Raises InputError: the path is not that of one."""
    try:
        found = load_class(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"cli={path} cannot be imported ({one_line(error)})",
            hint="give the class path of your LightningCLI and the directory of your code: --code DIR",
            setting="cli",
        ) from error
    if not (isinstance(found, type) and issubclass(found, LightningCLI)):
        raise InputError(f"cli={path} is not a LightningCLI", hint="name a subclass of LightningCLI", setting="cli")
    if hasattr(found, "fit"):
        fault = f"cli={path} defines fit, which cannot be used with Paceline: Lightning's Trainer.fit trains"
        raise InputError(fault, hint="move the rest of fit into before_fit and after_fit", setting="cli")
    return found


def with_classes(tree: Settings, overrides: Sequence[str]) -> Settings:
    """Settings of a LightningCLI that has its classes in its code, with those that the overrides name.

    Raises InputError: they name none.
    """
    named = dict(override.split("=", 1) for override in overrides if ".class_path=" in override)
    for section in CLASSES:
        if isinstance(given := tree.get(section), dict) and given and "class_path" not in given:
            if (path := named.get(key := f"{section}.class_path")) is None:
                hint = f"name the class that your script gives to LightningCLI: {key}=acme.lit.Tagger"
                raise InputError(f"the file has arguments of {section} and no {key}", hint=hint, setting=key)
            tree = tree | {section: {"class_path": path, "init_args": given}}
    return tree


def check_module(settings: Settings) -> bool:
    """Whether the data prepare themselves. Raises InputError: the model lacks a hook without which it cannot train."""
    path = settings["model"]["class_path"]
    module = load_class(path)
    has_optimizer = settings.get("optimizer") or "cli" in settings  # whose code may configure one
    needed = ["training_step"] + ([] if has_optimizer else ["configure_optimizers"])
    for hook in needed:
        if isinstance(module, type) and not is_overridden(hook, module, LightningModule):
            raise InputError(f"model.class_path={path} has no {hook}", hint=f"define {hook} in {path}")
    owners: list[tuple[Any, type]] = [(module, LightningModule)]
    if "data" in settings:
        owners.append((load_class(settings["data"]["class_path"]), LightningDataModule))
    return any(is_overridden("prepare_data", owner, parent) for owner, parent in owners)


def has_partitions(settings: Settings) -> bool:
    """Whether the DataModule can be prepared by partitions."""
    data = load_class(settings["data"]["class_path"]) if "data" in settings else None
    return all(callable(getattr(data, hook, None)) for hook in ("partitions", "prepare_partition"))


def instantiate_data(settings: Settings) -> Any:
    """The DataModule alone, without the model."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    return parser.instantiate_classes(parser.parse_object({"data": settings["data"]})).data


def partition_keys(data: Any) -> list[str]:
    """The keys of a DataModule's partitions. Raises InputError: a key cannot be the name of a folder of its own."""
    returned, name = data.partitions(), type(data).__name__
    hint = f"return a list of different texts from {name}.partitions, of letters, digits, _, - and dots"
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise InputError(f"partitions of {name} returned {returned!r}, which is not a list of keys", hint=hint)
    keys = list(returned)
    if not keys:
        raise InputError(f"partitions of {name} returned no key", hint=hint)
    numbers = Counter(key for key in keys if isinstance(key, str))
    for key in keys:
        is_name = isinstance(key, str) and _FOLDER.fullmatch(key) and not key.endswith(TEMPORARY_SUFFIX)
        if not is_name or numbers[key] > 1:
            fault = f"partitions of {name} returned the key {key!r}, which cannot name a folder of its own"
            raise InputError(fault, hint=hint)
    return keys


def check_prediction(settings: Settings) -> None:
    """Raise InputError: the model or its data lack a hook without which nothing can be predicted."""
    path, data = settings["model"]["class_path"], settings.get("data", {}).get("class_path")
    module = load_class(path)
    if isinstance(module, type) and not is_overridden("predict_step", module, LightningModule):
        raise InputError(f"model.class_path={path} has no predict_step", hint=f"define predict_step in {path}")
    owners = [(module, LightningModule), *([(load_class(data), LightningDataModule)] if data else [])]
    if all(isinstance(owner, type) for owner, _ in owners) and not any(
        is_overridden("predict_dataloader", *owner) for owner in owners
    ):
        where, owner = ("data", data) if data else ("model", path)
        raise InputError(
            f"{where}.class_path={owner} has no predict_dataloader",
            hint=f"define predict_dataloader in {owner}, or name another DataModule: data.class_path=acme.lit.Data",
            setting=f"{where}.class_path",
        )


def load_class(path: str) -> Any:
    """The class of a class path; it may be inside another class."""
    return resolve_name(path)
