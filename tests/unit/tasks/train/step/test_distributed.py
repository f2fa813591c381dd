from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from paceline.conf.recipe import Recipe
from paceline.tasks.model.optimization import build_optimizer, prepare_optimizer_state
from paceline.tasks.train.lightning.feed import FedShards
from paceline.tasks.train.step import distributed as step
from tests.support.refusals import refused


@pytest.fixture
def mesh():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Parent(nn.Module):
    """A part with parameters of its own that contains a large layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(step.UNIT_PARAMETERS))
        self.wide = nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)
        self.last = nn.Linear(512, 2)

    def forward(self, features):
        return self.last(self.norm(self.wide(features * self.scale[:512])))


def make_network(mesh, precision):
    network = nn.Sequential(nn.Linear(512, 512), Parent())
    step.apply_fsdp(network, mesh, precision)
    return network


def parameters_of(module):
    group = module._get_fsdp_state()._fsdp_param_group
    return {parameter._param_fqn or parameter._module_info.param_name for parameter in group.fsdp_params}


def test_a_large_layer_inside_a_large_part_is_gathered_by_itself(mesh):
    network = make_network(mesh, "32-true")
    first, parent = network
    assert all(isinstance(part, FSDPModule) for part in (first, parent, parent.wide))
    assert len(parameters_of(parent.wide)) == 2
    network(torch.randn(4, 512)).sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())


class Tied(LightningModule):
    """Blocks: one shares its weights with a layer outside of the list, one is listed twice, two share a layer."""

    def __init__(self):
        super().__init__()
        tied, twice = nn.Linear(512, 512), nn.Linear(512, 512)
        self.blocks = nn.ModuleList([tied, twice, twice, Parent(), Parent()])
        self.blocks[4].wide = self.blocks[3].wide
        self.out = nn.Linear(512, 512)
        self.out.weight = tied.weight


def test_a_block_that_shares_weights_is_sharded_with_what_it_shares_them_with(mesh):
    module = Tied()
    step.shard_module(module, mesh)
    tied, twice, _, *parents = module.blocks
    assert module.out.weight is tied.weight
    assert not any(isinstance(block, FSDPModule) for block in (tied, *parents))
    assert isinstance(twice, FSDPModule)


class Halves(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, features):
        return self.last(self.first(features))

    def optimized(self, kind, **settings):
        """An optimizer of the parts in another order than the module's, after a step."""
        groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in ((self.last, 0.1), (self.first, 0.2))]
        optimizer = kind(groups, **settings)
        self(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


@pytest.mark.parametrize(("kind", "settings"), [(torch.optim.SGD, {}), (torch.optim.Adam, {"weight_decay": 0.01})])
def test_the_optimizer_state_of_shards_is_that_of_one_device(mesh, tmp_path, kind, settings):
    alone, module = Halves(), Halves()
    module.load_state_dict(alone.state_dict())
    step.shard_module(module, mesh)
    strategy = FedShards(lambda loader: loader, 1)
    strategy.model = strategy._lightning_module = module
    optimizer, expected = module.optimized(kind, **settings), alone.optimized(kind, **settings).state_dict()
    strategy.optimizers = [optimizer]
    torch.testing.assert_close(strategy.optimizer_state(optimizer), expected)
    torch.save({"state_dict": alone.state_dict(), "optimizer_states": [expected]}, tmp_path / "plain.ckpt")
    module.optimized(kind, **settings)  # other weights
    optimizer.param_groups[0]["lr"] = 5.0
    for values in optimizer.state.values():
        values["exp_avg"].zero_()
    strategy.load_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    torch.testing.assert_close(strategy.optimizer_state(optimizer), expected)
    torch.testing.assert_close(strategy.lightning_module_state_dict(), dict(alone.state_dict()))


def test_batch_norms_over_all_ranks_are_refused_with_shards():
    strategy = FedShards(lambda loader: loader, 1)
    strategy._lightning_module, strategy._layer_sync = Halves(), TorchSyncBatchNorm()
    with refused("trainer.sync_batchnorm", "execution.strategy=fsdp"):
        strategy.setup(None)


class Averaged(EMAWeightAveraging):
    """A callback of a user."""


class Scaled(Halves):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("module", "callbacks", "fault"),
    [(Halves(), [Averaged()], "Averaged"), (Halves(), [StochasticWeightAveraging(0.1)], "StochasticWeightAveraging"),
     (Scaled(), [], "temperature")],
)  # fmt: skip
def test_what_needs_whole_weights_is_refused_with_shards(module, callbacks, fault):
    strategy = FedShards(lambda loader: loader, 1)
    strategy._lightning_module = module
    with refused(None, fault, "execution.strategy=fsdp"):
        strategy.setup(SimpleNamespace(callbacks=callbacks))


def test_each_unit_fetches_the_next_one_in_both_directions(mesh):
    network = make_network(mesh, "32-true")
    states = [part._get_fsdp_state() for part in (network[0], network[1], network[1].wide)]
    assert [state._states_to_forward_prefetch for state in states] == [[states[1]], [states[2]], []]
    assert [state._states_to_backward_prefetch for state in states] == [[], [states[0]], [states[1]]]


def test_what_autocast_rounds_is_gathered_in_bf16_and_all_else_in_float32(mesh):
    network, seen = make_network(mesh, "bf16-mixed"), {}

    def look(name):
        return lambda module, _: seen.update({name: module.weight.dtype})

    for name in ("wide", "norm", "last"):
        getattr(network[1], name).register_forward_pre_hook(look(name))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.randn(4, 512)).sum().backward()
    assert seen == {"wide": torch.bfloat16, "norm": torch.float32, "last": torch.bfloat16}
    assert {weight.grad.dtype for weight in network.parameters()} == {torch.float32}


@pytest.mark.parametrize(("name", "fused"), [("sgd", False), ("adam", True), ("adamw", True)])
def test_sharded_weights_are_updated_in_few_launches(mesh, name, fused):
    network = make_network(mesh, "32-true")
    optimizer = build_optimizer(network, Recipe(optimizer=name), 0.1)
    for _ in range(2):
        prepare_optimizer_state(optimizer, network)
        (group,) = optimizer.param_groups
        assert (group["fused"], group["foreach"]) == (fused, not fused)
        network(torch.randn(4, 512)).sum().backward()
        optimizer.step()
