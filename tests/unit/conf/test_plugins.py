"""Names of the user's sources and models: who offers them, what is refused, and what is imported when."""

import os
import subprocess
import sys

import pytest

from paceline.conf import plugins
from paceline.conf.config import Config
from paceline.conf.load import ConfigError, load
from paceline.conf.model import ModelName
from tests.support.documents import ROOT
from tests.support.own_package import install, on_path
from tests.support.refusals import refused

SOURCE = """
class Rows:
    needs_root, channels, has_masks, target_names = {facts}
    class_names = ("a", "b")
"""
MODEL = "def build(**sizes): ...\nbuild.task, build.takes_targets = {facts}\n"
PLAIN = "False, 1, False, ()"


@pytest.fixture
def offer(tmp_path):
    """Installs a package that offers the source `rows` and the model `net`."""

    def make(name="vision", source=PLAIN, model="'classify', False", version="1.0", offered=("rows", "net")):
        modules = {"data": SOURCE.format(facts=source), "nets": MODEL.format(facts=model)}
        install(tmp_path, name, modules, {offered[0]: "data:Rows"}, {offered[1]: "nets:build"}, version)

    with on_path(tmp_path):
        yield make


def test_every_embedded_name_has_its_facts():
    assert plugins.embedded("source") == plugins.Source.__args__
    assert plugins.embedded("model") == ModelName.__args__


def test_the_form_shows_the_embedded_names_and_takes_others():
    sections = Config.model_json_schema()["$defs"]
    for section, name, kind in (("Data", "source", "source"), ("Model", "name", "model")):
        named, free = sections[section]["properties"][name]["anyOf"]
        assert tuple(named["enum"]) == plugins.embedded(kind)
        assert set(free) == {"type", "pattern"}


def test_a_package_is_found_by_its_names(offer):
    offer()
    config = load("digits", ["data.source=rows", "model.name=net"])
    assert [(one.kind, one.name, one.package, one.version) for one in config.packages] == [
        ("source", "rows", "vision", "1.0"),
        ("model", "net", "vision", "1.0"),
    ]
    assert config.model.task == "classify"
    assert load("digits").packages == ()


def test_only_what_is_named_is_imported(offer):
    offer()
    load("digits")
    assert [one.name for kind in plugins.GROUPS for one in plugins.find_all(kind)] == ["rows", "net"]
    assert "vision" not in sys.modules
    load("digits", ["data.source=rows"])
    assert "vision.data" in sys.modules
    assert "vision.nets" not in sys.modules


def test_help_looks_no_package_up():
    code = "import sys, paceline.conf.plugins; paceline.conf.plugins._entries = None; "
    code += "import paceline.flows.cli; paceline.flows.cli._parser().format_help(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.stdout == "False\n", done.stderr


def test_a_name_that_nobody_offers_is_told_with_those_that_there_are(offer):
    offer()
    for setting, name, known in (
        ("data.source", "row", [*plugins.embedded("source"), "rows", "paceline.sources"]),
        ("model.name", "nets", [*plugins.embedded("model"), "net", "paceline.models"]),
        ("data.source", "a b", plugins.embedded("source")),
    ):
        with refused(setting, *known, kind=ConfigError) as error:
            load("digits", [f"{setting}={name}"])
        assert f"{setting}={name}" in error.value.args[0]


def test_two_packages_of_one_name_are_refused(offer):
    offer()
    offer("optics")
    with refused("data.source", "rows", "optics.data:Rows", "vision.data:Rows", kind=ConfigError):
        load("digits", ["data.source=rows"])


def test_an_embedded_name_cannot_be_taken(offer):
    offer(offered=("digits", "unet"))
    assert load("digits").packages == ()
    assert "vision" not in sys.modules


@pytest.mark.parametrize(
    ("facts", "overrides", "wrong"),
    [
        ({"source": "True, 2, False, ()"}, [], ["data.source", "channels=2", 1, 3]),
        ({"source": "False, 3, False, ('weight',)"}, [], ["data.source", "target_names=('weight',)"]),
        ({"source": "False, 3, False, None"}, [], ["data.source", "target_names=None"]),
        ({"source": "False, '3', False, ()"}, [], ["data.source", "channels='3'"]),
        ({"model": "None, False"}, ["model.name=net"], ["model.name", "task=None"]),
        ({"source": "False, 3, True, ('angle',)"}, [], ["data.source", "vision"]),
        ({"source": "False, 3, True, ()"}, [], ["model.name", "model.name=convblocks", "model.name=unet"]),
        ({"source": "False, 3, False, ('angle',)"}, ["model.name=net"], ["model.name", "model.name=twohead"]),
        ({"model": "'segment', False"}, ["model.name=net"], ["model.name", "model.name=net", "model.name=unet"]),
        ({"model": "'guess', False"}, ["model.name=net"], ["model.name", "task='guess'", "segment"]),
        ({}, ["data.root=/x"], ["data.root", "/x", "data.source=rows"]),
        ({}, ["model.name=unet"], ["model.name", "model.name=unet", "data.source=rows"]),
    ],
)
def test_what_does_not_fit_is_refused(offer, facts, overrides, wrong):
    offer(**facts)
    with refused(*wrong, kind=ConfigError):
        load("digits", ["data.source=rows", *overrides])


@pytest.mark.parametrize(
    ("code", "data"),
    [
        ("raise RuntimeError('no licence')", ["RuntimeError", "licence"]),
        ("import nothing_of_that_name", ["ModuleNotFoundError", "nothing_of_that_name"]),
        ("Rows = 3", ["int"]),
        ("", ["AttributeError", "Rows"]),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(tmp_path, offer, code, data):
    install(tmp_path, "vision", {"data": code}, {"rows": "data:Rows"})
    with refused("data.source", "data.source=rows", "vision", "1.0", "vision.data:Rows", *data, kind=ConfigError):
        load("digits", ["data.source=rows"])


def test_version_and_code_make_its_identity(tmp_path, offer):
    offer()
    first = plugins.find("source", "rows")
    offer(version="1.1")
    assert plugins.find("source", "rows").identity == first.identity.replace("1.0", "1.1")
    (tmp_path / "vision" / "data.py").write_text(SOURCE.format(facts=PLAIN) + "# another\n")
    assert plugins.find("source", "rows").code != first.code


def test_an_upgrade_changes_nothing_of_a_process_that_has_imported_it(offer):
    offer()
    before, _ = plugins.load("source", "rows")
    offer(version="2.0")
    assert plugins.find("source", "rows") == before
