"""The sources and models that a configuration may name: those of Paceline, and those of packages that users install.

What a package offers is defined in infra/docs/guides/extend.md.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterable
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paceline.conf.section import Section

Kind = Literal["source", "model"]
Task = Literal["classify", "segment", "denoise"]
"""Output of a network: the class of an image, that of each of its pixels, or the image without its noise."""
TASKS: tuple[Task, ...] = ("classify", "segment", "denoise")
ANGLE = "angle"  # the one target next to the class, in radians
GROUPS: dict[Kind, str] = {"source": "paceline.sources", "model": "paceline.models"}
TIMM = "timm/"  # how the names of timm's networks start
MISSING = "missing"  # the code of a package that is registered but not installed
SETTINGS: dict[Kind, str] = {"source": "data.source", "model": "model.name"}


class PluginError(ValueError):
    """A source or model that no package offers, or that does not follow the protocol."""


class SourceFacts(NamedTuple):
    """Facts of a source before it is opened. A user's source has attributes of these names."""

    needs_root: bool = True
    """Whether it reads from `data.root`; else none may be given."""
    channels: int = 3
    """Of an image: 1 for grey, 3 for colours."""
    has_masks: bool = False
    """Each image comes with the class of each of its pixels."""
    target_names: tuple[str, ...] = ()
    """Targets of each image next to its class."""
    has_clips: bool = False
    """Each sample is a clip of `data.num_frames` frames, each with so many channels."""


class NetworkFacts(NamedTuple):
    """Facts of a model before it is built, in the same way."""

    task: Task = "classify"
    takes_targets: bool = False
    """It also predicts the targets of a source next to the class."""
    takes_clips: bool = False
    """It takes clips, whose frames are the channels of an image."""
    image_mean: tuple[float, ...] = ()
    """Of each channel, of 1, by which images are normalised where they have so many channels; by default the data's."""
    image_std: tuple[float, ...] = ()
    """Standard deviation of each channel, in the same way."""


class Embedded(NamedTuple):
    """A source of Paceline's, as the settings know it. `tasks/data/sources/registry.py` has its functions."""

    help: str
    """A few words for the help of `data.source`."""
    facts: SourceFacts = SourceFacts()
    has_signals: bool = False
    """Samples are signals in time; their images have time from left to right."""
    is_drawn: bool = False
    """Images are drawn at the size asked for, and have no size of their own."""


_GREY = SourceFacts(needs_root=False, channels=1)
Source = Literal[
    "digits", "rotated_digits", "folder", "cifar10", "pairs", "shapes", "textures", "signals", "tones", "arrays",
    "clips", "motions", "webdataset", "imagefolder",
]  # fmt: skip
EMBEDDED_SOURCES: dict[str, Embedded] = {
    "digits": Embedded("1,797 handwritten digits", _GREY, is_drawn=True),
    "rotated_digits": Embedded("with the angle as second target", _GREY._replace(target_names=(ANGLE,)), is_drawn=True),
    "folder": Embedded("class-named folders of images"),
    "cifar10": Embedded("the official archives or class-named folders"),
    "pairs": Embedded("folders `images` and `masks` and a file `classes.txt`", SourceFacts(has_masks=True)),
    "shapes": Embedded(
        "2,000 generated scenes with their masks", SourceFacts(needs_root=False, has_masks=True), is_drawn=True
    ),
    "textures": Embedded("1,200 generated grey textures", _GREY, is_drawn=True),
    "signals": Embedded(
        "class-named folders of WAV, FLAC, MP3, Ogg, NumPy and Parquet files, as time-frequency images",
        SourceFacts(channels=1),
        has_signals=True,
    ),
    "tones": Embedded("1,800 generated sounds in noise", _GREY, has_signals=True),
    "arrays": Embedded("files .npz with `images` and `labels`, or Parquet with columns `image` and `label`"),
    "clips": Embedded("class-named folders of videos, or of folders with numbered frames", SourceFacts(has_clips=True)),
    "motions": Embedded(
        "1,600 generated clips in one of four directions", SourceFacts(needs_root=False, has_clips=True)
    ),
    "webdataset": Embedded("WebDataset shards .tar with images and labels"),
    "imagefolder": Embedded("images with a table `metadata.csv` of `file_name` and `label`"),
}
EMBEDDED_MODELS: dict[str, NetworkFacts] = {
    "convblocks": NetworkFacts(),
    "twohead": NetworkFacts(takes_targets=True),
    "whitened": NetworkFacts(),
    "unet": NetworkFacts("segment"),
    "dncnn": NetworkFacts("denoise"),
    "resnet18": NetworkFacts(),
    "resnet50": NetworkFacts(),
    "sequence": NetworkFacts(takes_clips=True),
}


class Plugin(Section):
    """A source or a model of the user's, as its package offers it."""

    kind: Kind
    name: str
    entry: str
    """Module and attribute, such as acme.table:Table."""
    package: str
    version: str
    code: str
    """12 hex digits over the Python files of the package: a version is not raised with every change."""

    @property
    def identity(self) -> str:
        """What another host, or another day, must have as well."""
        return f"{self.package} {self.version} ({self.entry}, code {self.code})"

    def __str__(self) -> str:
        return f"{SETTINGS[self.kind]}={self.name} (package {self.package} {self.version})"


def embedded(kind: Kind) -> tuple[str, ...]:
    """The names that come with Paceline; no package can take one of them."""
    return tuple(EMBEDDED_SOURCES if kind == "source" else EMBEDDED_MODELS)


def source_facts(name: str) -> SourceFacts:
    """Facts of a source, from its package if it is the user's; raise PluginError if they are wrong."""
    if name in EMBEDDED_SOURCES:
        return EMBEDDED_SOURCES[name].facts
    plugin, offered = load("source", name)
    facts = SourceFacts(**_read_facts(plugin, offered, SourceFacts._field_defaults))
    if facts.has_clips:
        fault = f"{plugin} has has_clips={facts.has_clips!r}, and sources of packages have images"
        raise PluginError(f"{fault}; remove has_clips")
    if facts.channels not in (1, 3):
        raise PluginError(f"{plugin} has channels={facts.channels!r}; use 1 for grey or 3 for colours")
    if facts.target_names not in ((), (ANGLE,)):
        raise PluginError(f'{plugin} has target_names={facts.target_names!r}; use ("{ANGLE}",), in radians, or none')
    if facts.has_masks and facts.target_names:
        raise PluginError(f"{plugin} has masks and targets, and no model learns both; remove one of them")
    return facts


def model_facts(name: str) -> NetworkFacts:
    """Facts of a model, from its package if it is the user's; raise PluginError if they are wrong."""
    if name in EMBEDDED_MODELS:
        return EMBEDDED_MODELS[name]
    plugin, offered = load("model", name)
    facts = NetworkFacts(**_read_facts(plugin, offered, NetworkFacts._field_defaults))
    if facts.task not in TASKS:
        raise PluginError(f"{plugin} has task={facts.task!r}; use {', '.join(TASKS[:-1])} or {TASKS[-1]}")
    return facts


def _read_facts(plugin: Plugin, offered: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    facts = {}
    for field, default in defaults.items():
        value = getattr(offered, field, default)
        facts[field] = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
        if type(facts[field]) is not type(default):
            kind = type(default).__name__
            raise PluginError(f"{plugin} has {field}={value!r}; give a {kind}, such as {default!r}, or none")
    return facts


_loaded: dict[tuple[Kind, str], tuple[Plugin, Any]] = {}
"""With what they were when they were imported: an upgrade of the package changes nothing of a process that runs."""


def load(kind: Kind, name: str) -> tuple[Plugin, Any]:
    """Import what a package offers under a name; raise PluginError if that fails."""
    if (kind, name) in _loaded:
        return _loaded[kind, name]
    plugin = find(kind, name)
    if name.startswith(TIMM):
        return _loaded.setdefault((kind, name), (plugin, _timm_builder(plugin)))
    entry, *_ = metadata.entry_points(group=GROUPS[kind], name=name, value=plugin.entry)
    try:
        offered = entry.load()
    except Exception as error:  # whatever a module raises at its import
        fault = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"{plugin} cannot be imported from {entry.value} ({fault}); fix the package") from error
    if not callable(offered):
        raise PluginError(f"{plugin}: {entry.value} is {type(offered).__name__}; name a class or a function there")
    return _loaded.setdefault((kind, name), (plugin, offered))


def find(kind: Kind, name: str) -> Plugin:
    """Find the package that offers a name, without importing it; raise PluginError if not exactly one does."""
    if (kind, name) in _loaded:
        return _loaded[kind, name][0]
    if kind == "model" and name.startswith(TIMM):
        try:
            version = metadata.version("timm")
        except metadata.PackageNotFoundError:
            fault = f"model.name={name} needs the package timm, which is not installed"
            raise PluginError(f"{fault}; use pip install 'paceline[timm]'") from None
        entry, code = "timm:create_model", code_of("timm")
        return Plugin(kind=kind, name=name, entry=entry, package="timm", version=version, code=code)
    plugins = find_all(kind)
    offers = [plugin for plugin in plugins if plugin.name == name]
    if not offers:
        names = [*embedded(kind), *(plugin.name for plugin in plugins)]
        raise PluginError(
            f"{SETTINGS[kind]}={name} is not one of {', '.join(names)}; "
            f"install the package that offers it by an entry point {name} in the group {GROUPS[kind]}, or use another"
        )
    if len(offers) > 1:
        packages = " and ".join(f"{plugin.package} ({plugin.entry})" for plugin in offers)
        raise PluginError(f"{SETTINGS[kind]}={name} is offered by {packages}; uninstall one or rename its entry point")
    return offers[0]


def _timm_builder(plugin: Plugin) -> Callable[..., Any]:
    """The function that builds a network of timm with random weights; it loads nothing from a hub."""
    try:
        timm: Any = import_module("timm")
    except Exception as error:  # torchvision raises anything next to a torch that it was not built for
        fault = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(
            f"{plugin} cannot be imported ({fault}); timm needs torchvision, and torchvision the torch that it was "
            "built for: install both from the index of torch, or uninstall timm and torchvision"
        ) from error
    name = plugin.name.removeprefix(TIMM)
    names = [*timm.list_models(), *timm.list_pretrained()]  # of architectures, and of these with a tag of weights
    if name not in names:
        near = ", ".join(TIMM + near for near in difflib.get_close_matches(name, names))
        fault = f"model.name={plugin.name} is not a network of timm {plugin.version}"
        raise PluginError(f"{fault}; use {near or 'a name that timm.list_models() gives'}")
    published = timm.get_pretrained_cfg(name)

    def build(*, image_shape: tuple[int, int, int], num_classes: int, width: int, depth: int) -> Any:
        height, _, channels = image_shape
        size = {"img_size": height} if getattr(published, "fixed_input_size", False) else {}
        return timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=channels, **size)

    build.image_mean = tuple(getattr(published, "mean", ()))  # type: ignore[attr-defined]
    build.image_std = tuple(getattr(published, "std", ()))  # type: ignore[attr-defined]
    return build


def find_all(kind: Kind) -> list[Plugin]:
    """All that the packages of this process offer, in order of the names. Takes 20 ms, and imports none of them."""
    plugins = [
        Plugin(
            kind=kind,
            name=entry.name,
            entry=entry.value,
            package=entry.dist.name if entry.dist else "",
            version=entry.dist.version if entry.dist else "",
            code=code_of(entry.module),
        )
        for entry in metadata.entry_points(group=GROUPS[kind])
    ]
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.package))


def code_of(module: str) -> str:
    """The digest of the package that a module belongs to; `MISSING` if there is no such package."""
    try:
        spec = util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None or (spec.submodule_search_locations is None and not spec.has_location):  # or built in
        return MISSING
    return code_digest(map(Path, sorted(spec.submodule_search_locations or [str(spec.origin)])))


def code_digest(places: Iterable[Path]) -> str:
    """12 hex digits over the names and contents of the Python files in folders, or of single files."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else (place,):
            digest.update(str(path.relative_to(place.parent)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
