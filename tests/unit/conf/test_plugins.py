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


def refused(*overrides):
    with pytest.raises(ConfigError) as error:
        load("digits", list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


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
    said = refused("data.source=row")
    assert said.startswith("data.source=row is not one of digits, rotated_digits, folder,")
    assert "motions, rows; install the package that offers it by an entry point row" in said
    assert "sequence, net; install the package" in refused("model.name=nets")
    assert "data.source=a b is not a name; choices: digits" in refused("data.source=a b")


def test_two_packages_of_one_name_are_refused(offer):
    offer()
    offer("optics")
    assert "data.source=rows is offered by optics (optics.data:Rows) and vision (vision.data:Rows); uninstall one" in (
        refused("data.source=rows")
    )


def test_an_embedded_name_cannot_be_taken(offer):
    offer(offered=("digits", "unet"))
    assert load("digits").packages == ()
    assert "vision" not in sys.modules


@pytest.mark.parametrize(
    ("facts", "overrides", "said"),
    [
        ({"source": "True, 2, False, ()"}, [], "has channels=2; use 1 for grey or 3 for colours"),
        ({"source": "False, 3, False, ('weight',)"}, [], "has target_names=('weight',)"),
        ({"source": "False, 3, False, None"}, [], "has target_names=None; give a tuple"),
        ({"source": "False, '3', False, ()"}, [], "has channels='3'; give a int, such as 3, or none"),
        ({"model": "None, False"}, ["model.name=net"], "has task=None; give a str, such as 'classify', or none"),
        ({"source": "False, 3, True, ('angle',)"}, [], "has masks and targets"),
        (
            {"source": "False, 3, True, ()"},
            [],
            "model.name=convblocks does not fit data.source=rows: the model does not learn masks",
        ),
        ({"source": "False, 3, False, ('angle',)"}, ["model.name=net"], "the model does not learn angles"),
        ({"model": "'segment', False"}, ["model.name=net"], "the model needs masks"),
        ({"model": "'guess', False"}, ["model.name=net"], "has task='guess'; use classify, segment or denoise"),
        ({}, ["data.root=/x"], "data.root=/x cannot be used with data.source=rows"),
        ({}, ["model.name=unet"], "model.name=unet does not fit data.source=rows"),
    ],
)
def test_what_does_not_fit_is_told(offer, facts, overrides, said):
    offer(**facts)
    assert said in refused("data.source=rows", *overrides)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported from vision.data:Rows (RuntimeError: no licence)"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("Rows = 3", "vision.data:Rows is int; name a class or a function there"),
        ("", "AttributeError: module 'vision.data' has no attribute 'Rows'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(tmp_path, offer, code, said):
    install(tmp_path, "vision", {"data": code}, {"rows": "data:Rows"})
    told = refused("data.source=rows")
    assert told.startswith("data.source=rows (package vision 1.0)")
    assert said in told


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
