"""What a network begins with, and which part of it learns."""

import copy
import os
import pickle
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.conf.load import ConfigError, load
from paceline.conf.model import Model
from paceline.conf.recipe import Recipe
from paceline.tasks.data.loading.sampling import BatchPlan, StepSchedule
from paceline.tasks.errors import InputError
from paceline.tasks.files import sha256_of
from paceline.tasks.model.networks.registry import OwnNetwork, ViewMean, build_network
from paceline.tasks.model.objectives import Classification
from paceline.tasks.model.optimization import build_optimizer, prepare_optimizer_state
from paceline.tasks.model.pretrained import begin_with, blank_network, check_fit, read_weights
from paceline.tasks.model.transfer import core_of, freeze, heads_of
from paceline.tasks.records.data import Pretrained
from paceline.tasks.train.step.learner import Learner
from tests.support.refusals import refused

MODEL = Model(width=4, depth=1)
SHAPE = (12, 12, 3)


def network_of(num_classes=5, seed=1, model=MODEL, shape=SHAPE):
    torch.manual_seed(seed)
    return build_network(model, shape, num_classes, 0)


def trained_a_little():
    network = network_of()
    network(torch.randn(8, 3, 12, 12) + 1)  # statistics that are not those of the start
    return network


def anew(path, network, *, same_classes=True):
    tensors, digest = read_weights(path)
    assert digest == sha256_of(path)
    return check_fit(tensors, network, same_classes=same_classes, where=f"model.pretrained={path.name}")


def begun(path, *, same_classes=True, **settings):
    """A network that has begun with a file's weights."""
    network = network_of(seed=2, **settings)
    names = anew(path, network, same_classes=same_classes)
    weights = Pretrained(
        reference=path.name, path=str(path), sha256=sha256_of(path), num_tensors=1, reinitialized=names
    )
    begin_with(network, weights)
    return network


def saved(directory, kind, network):
    """In one of the shapes that weights come in."""
    path = directory / f"weights{'.safetensors' if kind == 'safetensors' else '.pt'}"
    state = network.state_dict()
    wrapped = {f"network.{name}": tensor for name, tensor in state.items()}
    if kind == "safetensors":
        save_file(state, path)
    else:
        found = {
            "state dict": state,
            "half precision": {name: tensor.half() if tensor.dim() == 4 else tensor for name, tensor in state.items()},
            "checkpoint of ours": {"state_dict": wrapped, "epoch": 3, "loops": {"fit_loop": {}}},
            "data parallel": {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
            "old, without counters": {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")},
        }
        torch.save(found[kind], path)
    return path


@pytest.mark.parametrize("kind", ["state dict", "safetensors", "checkpoint of ours", "data parallel", "half precision"])
def test_weights_come_in_several_shapes(kind, tmp_path):
    network = trained_a_little()
    found = begun(saved(tmp_path, kind, network)).state_dict()
    exact = kind != "half precision"
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-3)
        assert found[name].dtype == tensor.dtype


def test_counters_of_batch_norm_need_not_be_there(tmp_path):
    network = trained_a_little()
    found = begun(saved(tmp_path, "old, without counters", network)).state_dict()
    assert torch.equal(found["features.1.running_mean"], network.state_dict()["features.1.running_mean"])


@pytest.mark.parametrize(("views", "begin_views"), [(1, 6), (6, 1)])
def test_views_over_which_a_mean_is_taken_are_no_other_network(views, begin_views, tmp_path):
    one, other = (MODEL.model_copy(update={"test_views": number}) for number in (views, begin_views))
    network = network_of(model=one)
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    found = begun(tmp_path / "weights.pt", model=other)
    assert all(torch.equal(*pair) for pair in zip(found.parameters(), network.parameters(), strict=True))


def test_a_head_for_other_classes_begins_by_the_seed(tmp_path):
    network = trained_a_little()
    path = saved(tmp_path, "state dict", network)
    for settings in ({"num_classes": 7}, {"same_classes": False}):
        found = begun(path, **settings)
        untouched = network_of(settings.get("num_classes", 5), seed=2)
        assert torch.equal(found.classify.weight, untouched.classify.weight)
        assert torch.equal(found.classify.bias, untouched.classify.bias)
        assert torch.equal(found.features[0].weight, network.features[0].weight)
    assert anew(path, network_of(7)) == ("classify.weight", "classify.bias")
    assert anew(path, network_of(5)) == ()


def test_weights_without_a_head_are_enough(tmp_path):
    network = trained_a_little()
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("classify")}
    torch.save(state, tmp_path / "weights.pt")
    assert anew(tmp_path / "weights.pt", network_of()) == ("classify.weight", "classify.bias")


def deeper(state):
    return state | {"features.99.weight": torch.ones(2)}


def without_a_layer(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith("features.4")}


def not_finite(state):
    return state | {"features.0.weight": torch.full_like(state["features.0.weight"], torch.nan)}


@pytest.mark.parametrize(
    ("change", "settings", "data"),
    [
        (deeper, {}, ["features.99.weight"]),
        (without_a_layer, {}, ["features.4.weight"]),
        (not_finite, {}, ["features.0.weight"]),
        (dict, {"model": Model(width=8, depth=1)}, ["features.0.weight", 4, 8]),
        (dict, {"shape": (12, 12, 1)}, ["features.0.weight", 3, 1]),
    ],
)
def test_weights_of_another_network_are_refused(change, settings, data, tmp_path):
    torch.save(change(network_of().state_dict()), tmp_path / "weights.pt")
    with refused("model.pretrained", "weights.pt", *data):
        anew(tmp_path / "weights.pt", network_of(**settings))


def test_a_deeper_resnet_of_the_same_shapes_is_another_network():
    """All names of ResNet-18 are in ResNet-34: half of a network would load without a word."""
    network = blank_network(Model(name="resnet18"), (32, 32, 3), 5, 0)
    state = network.state_dict()
    with refused("model.pretrained", "layer1.2.conv1.weight"):
        check_fit(state | {"layer1.2.conv1.weight": torch.ones(1)}, network, same_classes=True, where="x")


class Attack:
    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        return os.mkdir, (str(self.directory),)


def test_no_code_of_a_file_is_executed(tmp_path):
    for index, write in enumerate((torch.save, lambda found, path: path.write_bytes(pickle.dumps(found, protocol=2)))):
        path = tmp_path / f"{index}.pt"
        write({"state_dict": Attack(tmp_path / "made")}, path)
        with refused("model.pretrained", path):
            read_weights(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights", b"\x00" * 64], ids=["empty", "text", "zeros"])
def test_a_file_that_holds_no_weights(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with refused("model.pretrained", tmp_path / name):
        read_weights(tmp_path / name)


def test_a_truncated_file(tmp_path):
    path = saved(tmp_path, "safetensors", network_of())
    path.write_bytes(path.read_bytes()[:-10])
    with refused("model.pretrained", path):
        read_weights(path)


def test_a_file_of_something_else(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "weights.pt")
    with refused("model.pretrained", tmp_path / "weights.pt"):
        read_weights(tmp_path / "weights.pt")
    with refused("model.pretrained", tmp_path / "nothing.pt"):
        read_weights(tmp_path / "nothing.pt")


def test_a_file_that_was_changed_since_it_was_checked(tmp_path):
    path = saved(tmp_path, "state dict", network_of())
    weights = Pretrained(reference="x", path=str(path), sha256=sha256_of(path), num_tensors=1)
    saved(tmp_path, "state dict", network_of(seed=3))
    with refused(None, path):
        begin_with(network_of(), weights)


def test_no_weight_is_left_as_the_seed_made_it_without_being_told(tmp_path):
    """The network was another one when the weights were checked."""
    path = saved(tmp_path, "state dict", network_of())
    weights = Pretrained(reference="x", path=str(path), sha256=sha256_of(path), num_tensors=1)
    deep = network_of(model=MODEL.model_copy(update={"depth": MODEL.depth + 1}))
    with pytest.raises((InputError, RuntimeError), match=r"another network|must match|size"):
        begin_with(deep, weights)


# What learns


def test_heads():
    for name, heads in {"convblocks": ("classify",), "resnet18": ("fc",), "unet": ("classify",), "dncnn": ()}.items():
        network = blank_network(Model(name=name), (32, 32, 3), 5, 0)
        assert heads_of(network) == heads
    assert heads_of(blank_network(Model(name="twohead"), (32, 32, 3), 5, 1)) == ("classify", "regress")
    assert heads_of(blank_network(Model(test_views=6), (32, 32, 3), 5, 0)) == ("classify",)


def test_heads_of_a_network_of_the_users():
    plain = nn.Sequential(OrderedDict(body=nn.Linear(4, 3), classify=nn.Linear(3, 2)))
    assert heads_of(OwnNetwork(plain)) == heads_of(ViewMean(OwnNetwork(plain), 2)) == ("classify",)
    plain.heads = ("body",)
    assert heads_of(OwnNetwork(plain)) == ("body",)


@pytest.mark.parametrize("views", [1, 2])
def test_a_frozen_backbone_stays_bit_for_bit_statistics_included(views):
    network = network_of(model=MODEL.model_copy(update={"test_views": views}))
    freeze(network, "backbone")
    network = copy.deepcopy(network)  # as the arms of a probe have it
    before = copy.deepcopy(network.state_dict())
    optimizer = build_optimizer(network, Recipe(weight_decay=0.1), 0.1)
    prepare_optimizer_state(optimizer, network)
    for _ in range(3):
        optimizer.zero_grad()
        logits_NK, _ = network(torch.randn(8, 3, 12, 12))
        logits_NK.square().mean().backward()
        optimizer.step()
    changed = [name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])]
    assert [name.removeprefix("network.") for name in changed] == ["classify.weight", "classify.bias"]
    assert all(weight.grad is None for name, weight in network.named_parameters() if "features" in name)


@pytest.mark.parametrize(
    ("name", "layer", "first", "in_training"),
    [
        ("convblocks", "features.1", "features.4.weight", {"features"}),
        ("convblocks", "features", "classify.weight", set()),
        ("resnet18", "layer2.0", "layer2.1.conv1.weight", {"layer2"}),
        ("twohead", "branch", "skip.0.weight", set()),
        ("unet", "down.0", "down.1", {"down"}),
    ],
)
@pytest.mark.parametrize("views", [1, 2])
def test_a_layer_is_frozen_with_all_before_it(name, layer, first, in_training, views):
    model = Model(name=name, width=4, depth=1 if name == "convblocks" else 2, test_views=views)
    network = build_network(model, (16, 16, 3), 5, int(name == "twohead"))
    freeze(network, layer)
    core = core_of(network)
    trained = [weight for weight, parameter in core.named_parameters() if parameter.requires_grad]
    assert trained == [weight for weight, _ in core.named_parameters()][-len(trained) :]
    assert trained[0].startswith(first)
    modes = {part: module.training for part, module in core.named_modules()}
    frozen = {weight.rpartition(".")[0] for weight, parameter in core.named_parameters() if not parameter.requires_grad}
    assert not any(modes[part] for part in frozen)
    assert all(modes[weight.rpartition(".")[0]] for weight in trained)
    assert modes[""]
    assert all(modes[part] for part in in_training), "a part that is not frozen as a whole"


def test_parts_that_cannot_stay():
    network = network_of()
    with pytest.raises(KeyError):
        freeze(network, "feature")
    with pytest.raises(ValueError, match="classify"):
        freeze(network, "classify")
    assert all(weight.requires_grad for weight in network.parameters())
    assert all(part.training for part in network.modules())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_backbone_learns_at_its_own_rate(optimizer):
    recipe = Recipe(optimizer=optimizer, schedule="constant", num_epochs=1, backbone_rate=0.25)
    network = network_of()
    built = build_optimizer(network, recipe, 0.1)
    assert [group["lr"] for group in built.param_groups] == pytest.approx([0.1, 0.025])
    assert all(group["fused"] for group in built.param_groups)
    learner = Learner(network, Classification(5), recipe, 0.4, StepSchedule(BatchPlan(100, 10, 1)))
    learner.set_learning_rate(built)
    rates = {id(weight): group["lr"] for group in built.param_groups for weight in group["params"]}
    assert len(rates) == len(list(network.parameters()))
    for name, weight in network.named_parameters():
        assert rates[id(weight)] == pytest.approx(0.4 if name.startswith("classify") else 0.1), name


def test_one_rate_is_one_group_of_all_that_is_trained():
    network = network_of()
    (group,) = build_optimizer(network, Recipe(), 0.1).param_groups
    assert [id(weight) for weight in group["params"]] == [id(weight) for weight in network.parameters()]
    freeze(network, "backbone")
    (group,) = build_optimizer(network, Recipe(), 0.1).param_groups
    assert len(group["params"]) == 2
    (group,) = build_optimizer(network, Recipe(optimizer="muon"), 0.1).param_groups[1:]
    assert isinstance(network.classify, nn.Linear)
    assert group["params"][0] is network.classify.weight


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["model.freeze=backbone"], ["model.freeze", "model.pretrained=RUN_ID"]),
        (["model.freeze=features.1"], ["model.freeze", "model.freeze=features.1", "model.pretrained=RUN_ID"]),
        (["model.freeze=1.features", "model.pretrained=x.pt"], ["model.freeze", "1.features", "backbone"]),
        (
            ["model.freeze=backbone", "model.pretrained=x.pt", "recipe.backbone_rate=0.1"],
            ["recipe.backbone_rate", "model.freeze=none"],
        ),
        (["recipe.backbone_rate=0.1", "recipe.optimizer=muon"], ["recipe.backbone_rate", "recipe.optimizer=muon"]),
        (["data.classes=[cat]"], ["data.classes", "data.classes=[cat]", 2]),
        (["data.classes=[cat,cat]"], ["data.classes", "data.classes=[cat,cat]", 2]),
        (["model.pretrained=https://me:secret@host/w.pt"], ["model.pretrained", "AWS_PROFILE"]),
    ],
)
def test_settings_that_do_not_fit(overrides, wrong):
    with refused(*wrong, kind=ConfigError):
        load("digits", overrides)
