import pytest
import torch

from conf.schema import Model, Recipe
from tasks.data.loading.order import BatchPlan
from tasks.model.networks import build_network
from tasks.model.task import Classification
from tasks.model.transfer import freeze_backbone
from tasks.records import Arm
from tasks.train.bare_step import BareStep, StepInputs

ARM = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="resident")


class Batch:
    targets_NT = None
    weight = 1.0

    def __init__(self, size):
        self.images_NCHW = torch.randn(size, 1, 12, 12)
        self.labels_N = torch.zeros(size, dtype=torch.int64)


class Source:
    """Epochs of two full batches and a ragged one; remembers the sizes that were taken."""

    def __init__(self, plan):
        self.plan, self.sizes, self.position = plan, [], 0

    def __len__(self):
        return self.plan.steps_per_epoch

    def seek(self, step):
        self.position = step

    def __iter__(self):
        for step in range(self.position % len(self), len(self)):
            start, stop = self.plan.bounds(step)
            self.sizes.append(stop - start)
            yield Batch(stop - start)


def test_a_probe_runs_only_full_batches_and_leaves_the_network_alone():
    plan = BatchPlan(num_samples=19, global_batch_size=8)
    assert (plan.steps_per_epoch, plan.num_full_steps) == (3, 2)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    source = Source(plan)
    step = BareStep(
        StepInputs(network, Classification(10), Recipe(), 0.1, torch.device("cpu")), ARM, source, plan.num_full_steps
    )
    seconds = step.run(5)
    step.close()
    assert len(seconds) == 5
    assert min(seconds) > 0
    assert source.sizes == [8] * 5
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_each_arm_of_a_probe_trains_the_head_alone_where_the_backbone_is_frozen(layout):
    """A frozen backbone has no backward pass: were it trained in one arm, the ratio would be a false one."""
    plan = BatchPlan(num_samples=16, global_batch_size=8)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    freeze_backbone(network)
    step = BareStep(
        StepInputs(network, Classification(10), Recipe(), 0.1, torch.device("cpu")),
        ARM.model_copy(update={"memory_format": layout}),
        Source(plan),
        plan.num_full_steps,
    )
    step.run(3)
    before = network.state_dict()
    changed = {name for name, tensor in step._network.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"classify.weight", "classify.bias"}
    assert all(weight.grad is None for weight in step._network.features.parameters())
    step.close()
