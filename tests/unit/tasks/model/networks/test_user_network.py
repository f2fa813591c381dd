"""Models of the user's: built, tried, told apart by version, and opened again."""

import hashlib

import pytest
import torch

from paceline.conf.load import load
from paceline.conf.model import Model
from paceline.tasks.errors import RunError
from paceline.tasks.files import sha256_of
from paceline.tasks.fingerprint import series_fingerprint, workload_fingerprint
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.pretrained import load_trained_model
from paceline.tasks.model_bundle import FACTS, WEIGHTS, check_package, digest_of
from paceline.tasks.records.data import ModelFacts
from paceline.tasks.records.hardware import Hardware
from paceline.tasks.speedup.comparability import comparison_facts, match
from paceline.tasks.train.plan import resolve
from tests.support.own_package import forget, install, on_path
from tests.support.refusals import refused

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    task = "{task}"

    def __init__(self, image_shape, num_classes, width, depth):
        super().__init__()
        height, wide, channels = image_shape
        self.flat = nn.Flatten()
        self.norm = nn.BatchNorm2d(channels)
        self.classify = nn.Linear(height * wide * channels, num_classes)

    def forward(self, images_NCHW):
        {forward}
"""
LOGITS = "return self.classify(self.flat(self.norm(images_NCHW)))"
MODEL = Model(name="net")
SHAPE = (6, 5, 1)


@pytest.fixture
def offer(tmp_path):
    """Installs a package that offers the model `net`."""
    site = tmp_path / "site"
    site.mkdir()

    def make(forward=LOGITS, task="classify", version="1.0", code=CODE):
        forget(["netpack"])
        install(site, "netpack", {"net": code.format(forward=forward, task=task)}, None, {"net": "net:Net"}, version)

    with on_path(site):
        make()
        yield make


def facts_of_version(offer, version):
    offer(version=version)
    config = load("digits", ["model.name=net"])
    hardware = Hardware(host="host", cpu_name="X", num_cores=2, memory_bytes=2**33, cpu_bf16=True)
    facts = comparison_facts(config, "d0", "c0", {"torch": "2"}, resolve(config, hardware, 1293))
    return facts, workload_fingerprint(config.workload, "d"), series_fingerprint(config, "X", ("0", "1"))


@pytest.mark.parametrize("forward", [LOGITS, f"{LOGITS}, None"])
def test_a_tensor_is_as_good_as_a_pair(offer, forward):
    offer(forward)
    network = build_network(MODEL, SHAPE, 7, 0)
    logits, targets = network(torch.zeros(3, 1, 6, 5))
    assert logits.shape == (3, 7)
    assert targets is None
    assert network.training


def test_trying_it_changes_nothing_of_it(offer):
    network = build_network(MODEL, SHAPE, 7, 0)
    assert network.network.norm.num_batches_tracked == 0
    torch.manual_seed(1)
    first = build_network(MODEL, SHAPE, 7, 0).network.classify.weight
    torch.manual_seed(1)
    assert torch.equal(first, build_network(MODEL, SHAPE, 7, 0).network.classify.weight)


def test_views_go_with_it(offer):
    network = build_network(Model(name="net", test_views=2), SHAPE, 7, 0).eval()
    assert network(torch.zeros(3, 1, 6, 5))[0].shape == (3, 7)


@pytest.mark.parametrize(
    ("forward", "task", "said"),
    [
        (
            "return images_NCHW",
            "classify",
            "(2, 1, 6, 5) and NoneType",
        ),
        (LOGITS, "segment", "(2, 7, 6, 5)"),
        (LOGITS, "denoise", "(2, 1, 6, 5)"),
        (f"{LOGITS}, images_NCHW", "classify", "(2, 7) and (2, 1, 6, 5)"),
        ("return None", "classify", "NoneType and NoneType"),
        ("return self.classify(images_NCHW)", "classify", "RuntimeError (mat1 and mat2"),
    ],
)
def test_a_model_that_gives_something_else_is_told_with_its_name(offer, forward, task, said):
    offer(forward, task)
    with refused("model.name", "model.name=net", "netpack", "1.0", kind=RunError) as error:
        build_network(MODEL, SHAPE, 7, 0)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def Net(**sizes): return 3", "torch.nn.Module"),
        ("def Net(image_shape): ...", "TypeError"),
        (
            "from torch import nn\n"
            "def Net(**sizes): return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(sizes['num_classes']))",
            "has no weights to be learned",
        ),
    ],
)
def test_what_is_no_model_is_told(offer, code, said):
    offer(code=code)
    with refused("model.name", "model.name=net", kind=RunError) as error:
        build_network(MODEL, SHAPE, 7, 0)
    assert said in str(error.value)


def test_two_versions_are_two_workloads_in_one_series(offer):
    first, workload, series = facts_of_version(offer, "1.0")
    again, same_workload, _ = facts_of_version(offer, "1.0")
    second, other_workload, same_series = facts_of_version(offer, "1.1")
    assert match(first, again).matches
    assert [field.field for field in match(first, second).breaking] == ["model.package"]
    assert (workload == same_workload, workload == other_workload, series == same_series) == (True, False, True)


def test_the_workloads_of_models_of_paceline_stay():
    """What stores have of runs before there were own packages, sounds, classes and weights to begin with."""
    before = {"digits": ("af4f65a1", "c5a70fb4"), "twohead": ("51e29f9a", "54682204")}
    for preset, found in before.items():
        config = load(preset)
        assert (workload_fingerprint(config.workload, "d"), series_fingerprint(config, "2 cpu", ["a", "b"])) == found
    other = load("digits", ["recipe.backbone_rate=0.5"])
    assert workload_fingerprint(other.workload, "d") != before["digits"][0]
    assert workload_fingerprint(load("digits").workload, "d", "weights") != before["digits"][0]


@pytest.fixture
def kept(offer, tmp_path):
    """A model of the package on disk, and what it is."""
    directory = tmp_path / "model"
    directory.mkdir()
    torch.save(build_network(MODEL, SHAPE, 2, 0).state_dict(), directory / WEIGHTS)
    facts = ModelFacts(
        model=MODEL,
        image_shape=SHAPE,
        class_names=("a", "b"),
        mean=(0.5,),
        std=(0.5,),
        fingerprint="f",
        weights_sha256=sha256_of(directory / WEIGHTS),
        package=MODEL.plugin,
    )
    (directory / FACTS).write_text(facts.model_dump_json())
    return directory, facts


def test_a_trained_model_is_opened_with_its_package(kept):
    network, facts = load_trained_model(kept[0], digest_of(kept[1]))
    assert facts.package.version == "1.0"
    assert network(torch.zeros(1, 1, 6, 5))[0].shape == (1, 2)
    assert check_package(facts.model, facts.package) is None


def test_without_its_package_it_is_told_which_one(kept, tmp_path):
    forget(["netpack"])
    (tmp_path / "site" / "netpack-1.0.dist-info").rename(tmp_path / "elsewhere")
    forget(["netpack"])
    with refused("model.name", "model.name=net", "netpack", "1.0"):
        check_package(kept[1].model, kept[1].package)
    with refused("model.name", "model.name=net", "convblocks"):
        load_trained_model(kept[0], digest_of(kept[1]))


def test_another_version_is_told_and_another_package_refused(kept, offer):
    recorded = kept[1].package
    offer(version="1.1")
    assert "was trained with netpack 1.0" in check_package(MODEL, recorded)
    with refused("model.name", "optics", "1.0"):
        check_package(MODEL, recorded.model_copy(update={"package": "optics"}))
    assert check_package(Model(name="unet"), None) is None


def test_models_of_paceline_keep_their_digest(kept):
    facts = kept[1].model_copy(update={"model": Model(), "package": None})
    later = {"package": True, "signal": True, "fit": True, "model": {"pretrained", "freeze"}}
    written = facts.model_dump_json(exclude=later)
    assert digest_of(facts) == hashlib.sha256(written.encode()).hexdigest(), "as before there were these fields"
    assert digest_of(ModelFacts.model_validate_json(written)) == digest_of(facts)
