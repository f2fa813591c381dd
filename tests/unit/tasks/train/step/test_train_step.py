from contextlib import contextmanager

import pytest
import torch

from paceline.conf.model import Model
from paceline.conf.recipe import Recipe
from paceline.tasks.data.loading.sampling import BatchPlan
from paceline.tasks.errors import MemoryLimitError
from paceline.tasks.model import batch as batches
from paceline.tasks.model.networks.registry import build_network
from paceline.tasks.model.objectives import Classification
from paceline.tasks.model.out_of_memory import is_out_of_memory
from paceline.tasks.model.transfer import freeze
from paceline.tasks.records.execution import Arm
from paceline.tasks.train.step import benchmark_step
from paceline.tasks.train.step.benchmark_step import BareStep, StepInputs
from paceline.tasks.train.step.precision import make_scaler
from paceline.tasks.train.step.train_step import TrainStep, oom_sample_count, split_into_micro_batches

ARM = Arm(num_devices=1, precision="32-true", compile="off", memory_format="contiguous", loading="resident")


class Batch:
    mixed_labels_N = mix_weights_N = None
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


@pytest.mark.parametrize(("variant", "moves"), [("full", True), ("no_update", False)])
def test_an_arm_without_updates_computes_and_leaves_its_weights(variant, moves):
    plan = BatchPlan(num_samples=16, global_batch_size=8)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    inputs = StepInputs(network, Classification(10), Recipe(ema=0.9), 0.1, torch.device("cpu"))
    step = BareStep(inputs, ARM.model_copy(update={"variant": variant}), Source(plan), plan.num_full_steps)
    step.run(3)
    after = dict(step._network.named_parameters())
    changed = [name for name, tensor in network.named_parameters() if not torch.equal(tensor, after[name])]
    assert bool(changed) is moves
    assert all(tensor.grad is not None for tensor in after.values())
    step.close()


@pytest.mark.parametrize(("learning_rate", "diverged"), [(0.1, False), (1e30, True)])
def test_an_arm_that_diverges_says_so(learning_rate, diverged):
    plan = BatchPlan(num_samples=16, global_batch_size=8)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    inputs = StepInputs(network, Classification(10), Recipe(), learning_rate, torch.device("cpu"))
    step = BareStep(inputs, ARM, Source(plan), plan.num_full_steps)
    assert not step.has_diverged()
    step.run(4)
    assert step.has_diverged() is diverged
    step.close()


def test_each_block_of_an_arm_sets_the_arithmetic_of_the_arm(monkeypatch):
    """It is the process's: the block before was another arm's."""
    seen = []
    monkeypatch.setattr(benchmark_step, "set_arithmetic", lambda precision, device: seen.append(precision))
    plan = BatchPlan(num_samples=16, global_batch_size=8)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    inputs = StepInputs(network, Classification(10), Recipe(), 0.1, torch.device("cpu"))
    arms = [ARM, ARM.model_copy(update={"precision": "tf32"})]
    steps = [BareStep(inputs, arm, Source(plan), plan.num_full_steps) for arm in arms]
    for step in (*steps, *reversed(steps)):
        step.run(1)
    assert seen == ["32-true", "tf32", "tf32", "32-true"]


@pytest.mark.parametrize("ema", [None, 0.9])
def test_each_arm_of_a_probe_averages_weights_where_the_training_does(ema):
    plan = BatchPlan(num_samples=16, global_batch_size=8)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    step = BareStep(
        StepInputs(network, Classification(10), Recipe(ema=ema), 0.1, torch.device("cpu")),
        ARM,
        Source(plan),
        plan.num_full_steps,
    )
    average = step._step._average
    step.run(3)
    step.close()
    assert (average is None) == (ema is None)
    if average is not None:
        assert average.sums["classify.weight"].abs().sum() > 0


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_each_arm_of_a_probe_trains_the_head_alone_where_the_backbone_is_frozen(layout):
    """A frozen backbone has no backward pass: were it trained in one arm, the ratio would be a false one."""
    plan = BatchPlan(num_samples=16, global_batch_size=8)
    network = build_network(Model(width=2, depth=1), (12, 12, 1), 10, 0)
    freeze(network, "backbone")
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


def numbered(size, weight=1.0):
    numbers = torch.arange(size)
    return batches.Batch(numbers.float().view(size, 1, 1, 1), numbers, None, numbers + 100, weight)


@pytest.mark.parametrize(
    ("size", "largest", "sizes"), [(8, None, [8]), (8, 8, [8]), (8, 4, [4, 4]), (10, 4, [3, 3, 4]), (3, 1, [1, 1, 1])]
)
def test_passes_are_few_and_even_and_have_each_sample_once_in_its_order(size, largest, sizes):
    parts = split_into_micro_batches(numbered(size, weight=1.5), largest)
    assert [len(part.labels_N) for part in parts] == sizes
    for name in ("images_NCHW", "labels_N", "noise_seeds_N"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(numbered(size), name))
    assert sum(part.weight for part in parts) == pytest.approx(1.5)


class Mean(torch.nn.Module):
    """A loss whose gradient is known: the mean of the images times the weight. Notes what it is asked to do."""

    def __init__(self, fits=8):
        super().__init__()
        self.value = torch.nn.Parameter(torch.ones(()))
        self.seen, self.fits, self.exchanges = [], fits, True

    @contextmanager
    def no_sync(self):
        self.exchanges = False
        yield
        self.exchanges = True

    def forward(self, batch):
        if len(batch.labels_N) > self.fits:
            raise torch.OutOfMemoryError("no room")
        self.seen.append((len(batch.labels_N), self.exchanges))
        return (self.value * batch.images_NCHW).mean() * batch.weight


def step_of(model, micro_batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    arm = ARM.model_copy(update={"micro_batch": micro_batch})
    return TrainStep(model, optimizer, make_scaler("32-true", device), arm, device)


def test_a_step_in_passes_exchanges_once_and_updates_once_by_the_gradient_of_all_samples():
    model = Mean()
    step = step_of(model, micro_batch=4)
    loss = step(numbered(10, weight=2.0))
    assert model.seen == [(3, False), (3, False), (4, True)]
    assert loss.item() == pytest.approx(2 * 4.5)
    assert model.value.item() == pytest.approx(1 - 0.1 * 2 * 4.5)
    assert (step.num_steps, step.num_passes) == (1, 3)


def test_a_pass_that_does_not_fit_says_how_many_samples_it_had_and_leaves_the_weights():
    model = Mean(fits=2)
    with pytest.raises(
        MemoryLimitError, match="a pass over 4 samples needs more memory than cpu has: no room"
    ) as found:
        step_of(model, micro_batch=4)(numbered(8))
    assert found.value.num_samples == 4
    assert model.value.item() == 1.0
    later = RuntimeError("the recording failed")
    later.__context__ = found.value
    assert oom_sample_count(later) == 4
    assert oom_sample_count(ValueError("another")) is None


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error: unhandled cuda error, last error: Cuda failure 2 'out of memory'"),
]
OTHERS = [
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("a file named out of memory"),
]


def failing(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
@pytest.mark.parametrize("place", ["forward", "backward", "first update", "scaler"])
def test_want_of_memory_is_recognised_in_each_part_of_a_step(place, error):
    model = Mean()
    step = step_of(model, micro_batch=4)
    if place == "forward":
        model.forward = failing(error)
    elif place == "backward":
        model.value.register_hook(failing(error))
    elif place == "first update":
        step._optimizer.step = failing(error)
    else:
        step._scaler.update = failing(error)
    with pytest.raises(MemoryLimitError, match="over 4 samples needs more memory than cpu has") as found:
        step(numbered(8))
    assert found.value.num_samples == 4


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_of_a_step_are_their_own(error):
    model = Mean()
    step = step_of(model, micro_batch=4)
    step._optimizer.step = failing(error)
    with pytest.raises(type(error)) as found:
        step(numbered(8))
    assert found.value is error
    assert not is_out_of_memory(error)
