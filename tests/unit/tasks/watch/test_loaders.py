"""Loaders and batches of all kinds: their lengths, their sizes, and several of them in one step."""

import random
from functools import partial
from itertools import islice
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from paceline.tasks.watch import account as module
from paceline.tasks.watch.account import DRAWS_RANDOM, SAMPLES_BY_CODE, Account
from paceline.tasks.watch.generators import runs_user_code
from paceline.tasks.watch.hooks import follow
from paceline.tasks.watch.verdict import judge
from tests.support.watched_loops import BATCH, CLOCK, NUM_SAMPLES, QUIET, Numbers, QuietWatch, train, watched


class Batch:
    """A batch of a class that Paceline does not know."""

    def __init__(self, samples):
        self.inputs, self.targets = (torch.stack(tensors) for tensors in zip(*samples, strict=True))

    def __iter__(self):
        return iter((self.inputs, self.targets))


class Buckets(Sampler):
    """Batches of shuffled samples, and what forming them for the length does."""

    def __init__(self, find_length):
        self.find_length, self.num_calls = find_length, 0

    def __iter__(self):
        order = random.sample(range(NUM_SAMPLES), NUM_SAMPLES)
        return iter([order[start : start + BATCH] for start in range(0, NUM_SAMPLES, BATCH)])

    def __len__(self):
        self.num_calls += 1
        return self.find_length(self)


def no_length(sampler):
    raise ValueError("the length is ambiguous")


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("find_length", "reason"),
    [
        (no_length, ""),
        (lambda sampler: len(list(iter(sampler))), "the loader draws random numbers in the process of the training"),
        (lambda sampler: NUM_SAMPLES // BATCH, ""),
        (lambda sampler: NUM_SAMPLES // BATCH // 2, "the loader has more batches than its length"),
    ],
    ids=["none", "draws", "costly", "wrong"],
)
def test_the_length_of_a_loader_is_read_rarely_and_without_effect(find_length, reason, num_workers, monkeypatch):
    monkeypatch.setattr(module, "ValidityWatch", QuietWatch)  # else a busy machine is measured again, and reads again
    random.seed(5)
    loader = DataLoader(Numbers(), batch_sampler=Buckets(find_length), num_workers=num_workers)
    losses, _ = train(loader)
    random.seed(5)
    sampler = Buckets(find_length)
    (watched_losses, _), account = watched(DataLoader(Numbers(), batch_sampler=sampler, num_workers=num_workers))
    assert watched_losses == losses
    assert account.why_not_measured == reason
    assert bool(account.blocks.at_hand) == (not reason)
    assert 0 < sampler.num_calls <= len(account.blocks.at_hand) + 30 / module.MIN_BLOCK


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    ("collate", "num_samples", "reason"),
    [
        (Batch, 0, "the size of a batch is unknown"),
        (lambda samples: (torch.stack([one for one, _ in samples]).to_sparse(), *Batch(samples)), BATCH, "unknown"),
        (lambda samples: (torch.nested.as_nested_tensor([one for one, _ in samples]), *Batch(samples)), 0, ""),
        (
            lambda samples: {"names": ["a", None], "rows": Batch(samples).inputs.numpy(), "batch": [*Batch(samples)]},
            BATCH,
            "",
        ),
    ],
    ids=["a class", "sparse", "nested", "arrays"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_of_all_kinds(collate, num_samples, reason):
    account, weight = Account(), torch.ones(8, 1, requires_grad=True)
    with follow(account):
        for batch in DataLoader(Numbers(), BATCH, collate_fn=collate):
            *_, inputs, _ = batch["batch"] if isinstance(batch, dict) else batch
            (inputs @ weight).sum().backward()
    account.stop()
    assert account.num_steps == NUM_SAMPLES / BATCH
    assert {step.num_samples for block in account.blocks.normal for step in block} == {num_samples}
    assert reason in account.why_not_measured
    assert bool(account.blocks.at_hand) == (not reason)


def step_of(weights, inputs):
    CLOCK.work(0.001)
    (inputs @ weights).sum().backward()


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("is_first_slow", [True, False])
def test_the_wait_for_each_of_several_loaders(is_first_slow, clock):
    account, weights = Account(), torch.ones(8, 1, requires_grad=True)
    loaders = [DataLoader(Numbers(seconds=0.002 * is_slow), BATCH) for is_slow in (is_first_slow, not is_first_slow)]
    with follow(account):
        for _ in range(2):
            for (first, _), (second, _) in zip(*loaders, strict=True):
                step_of(weights, first + second)
    account.stop()
    account.validity = QUIET
    result = judge(account, "train.py")
    assert account.num_steps == 2 * NUM_SAMPLES / BATCH
    assert result.parts["data_wait"] == pytest.approx(0.008, rel=0.01)
    assert result.step_seconds == pytest.approx(0.009, rel=0.01)
    assert (result.cause, result.gain_source) == ("data-bound", "computed")
    assert result.why_not_measured == "a step takes batches of several loaders"


@pytest.mark.usefixtures("short_blocks")
def test_batches_that_are_all_read_before_they_are_trained_on(clock):
    account, weights = Account(), torch.ones(8, 1, requires_grad=True)
    with follow(account):
        for _ in range(3):
            batches = iter(DataLoader(Numbers(seconds=0.001), BATCH))
            for _ in range(NUM_SAMPLES // BATCH // 4):
                for inputs, _ in [next(batches) for _ in range(4)]:
                    step_of(weights, inputs)
    account.stop()
    account.validity = QUIET
    result = judge(account, "train.py")
    assert account.num_steps == 3 * NUM_SAMPLES / BATCH / 4
    assert result.parts["data_wait"] == pytest.approx(0.016, rel=0.01)
    assert result.step_seconds == pytest.approx(0.020, rel=0.01)
    assert result.samples_per_second == pytest.approx(16 / 0.020, rel=0.01)
    assert result.why_not_measured == "a step takes several batches before it trains"


@pytest.mark.usefixtures("short_blocks")
def test_steps_with_a_validation_or_a_skipped_batch_are_left_out(clock, monkeypatch):
    monkeypatch.setattr(module, "ValidityWatch", QuietWatch)
    account, weights = Account(), torch.ones(8, 1, requires_grad=True)
    validation = DataLoader(Numbers(seconds=0.1), 120)
    with follow(account):
        for _ in range(2):
            for number, (inputs, _) in enumerate(DataLoader(Numbers(), BATCH)):
                if number % 20 == 7:
                    continue
                step_of(weights, inputs)
                if number % 20 == 15:
                    for held_out, _ in validation:
                        with torch.no_grad():
                            held_out @ weights
    account.stop()
    account.validity = QUIET
    result = judge(account, "train.py")
    assert account.num_steps == 2 * (NUM_SAMPLES / BATCH - 6)
    assert result.step_seconds == pytest.approx(0.001, rel=0.05)
    assert account.why_not_measured == ""
    assert account.num_rounds >= 8


@pytest.mark.usefixtures("short_blocks")
def test_each_epoch_may_have_a_loader_that_is_not_read_to_its_end():
    account, weights = Account(), torch.ones(8, 1, requires_grad=True)
    with follow(account):
        for _ in range(4):
            for inputs, _ in islice(DataLoader(Numbers(), BATCH), 50):
                step_of(weights, inputs)
    account.stop()
    assert account.num_steps == 4 * 50
    assert account.why_not_measured == ""
    assert account.blocks.at_hand


class ReadAhead(DataLoader):
    """Reads a batch before the one before it is trained on."""

    def __iter__(self):
        batches = super().__iter__()
        newest = next(batches)
        for batch in batches:
            yield newest
            newest = batch
        yield newest


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_the_last_batch_of_a_loop_that_reads_ahead_counts(num_batches):
    def train_ahead():
        model = nn.Linear(1, 1)
        for _ in range(3):
            for (numbers,) in ReadAhead(TensorDataset(torch.rand(num_batches, 1)), 1):
                model(numbers).sum().backward()

    account = Account()
    with follow(account):
        train_ahead()
    account.stop()
    assert account.num_steps == 3 * num_batches


GENERATOR = np.random.default_rng(0)
drawing = ModuleType("drawing")
drawing.GENERATOR = np.random.default_rng(0)


def from_module(number):
    return number + GENERATOR.normal()


class Transform:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, number):
        return number + draw_from(self.generator)


def draw_from(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator)
    return generator.random()


class ByClass:
    """Draws from a generator of its class, by all kinds of methods."""

    generator = np.random.default_rng(0)

    def plain(self, number):
        return number + self.generator.normal()

    @classmethod
    def of_class(cls, number):
        return number + cls.generator.normal()

    @staticmethod
    def static(number):
        return from_module(number)

    @property
    def noise(self):
        return GENERATOR.normal()

    def by_property(self, number):
        return number + self.noise


def from_class(number):
    return number + ByClass.generator.normal()


def inside(number):
    return number + sum(GENERATOR.normal() for _ in range(2))


def by_default(number, *, generator=ByClass.generator):
    return number + generator.normal()


def from_other_module(number):
    return number + drawing.GENERATOR.normal()


class Transformed(Numbers):
    """Changes each sample by a transform."""

    def __init__(self, transform=None):
        super().__init__()
        self.transform = transform

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return (self.transform(inputs).float() if self.transform else inputs), targets


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    "make",
    [
        lambda: from_module,
        lambda: Transform(random.Random(0)),
        lambda: Transform(torch.Generator().manual_seed(0)),
        lambda: Transform(np.random.RandomState(0)),
        lambda: ByClass().plain,
        lambda: ByClass.of_class,
        lambda: ByClass.static,
        lambda: ByClass().by_property,
        lambda: from_class,
        lambda: inside,
        lambda: by_default,
        lambda: from_other_module,
    ],
    ids=[
        "of a module", "of Python", "of torch", "of NumPy", "of a class", "in a class method", "in a static method",
        "in a property", "of a class that is named", "in a comprehension", "as a default", "of another module",
    ],
)  # fmt: skip
def test_a_loader_that_draws_from_a_generator_of_the_user_is_not_read_ahead(make):
    (_, _), account = watched(DataLoader(Transformed(make()), BATCH), 2)
    assert account.why_not_measured == DRAWS_RANDOM
    (_, _), account = watched(DataLoader(Transformed(), BATCH), 2)
    assert not account.why_not_measured


class RarelyDrawing(Transformed):
    """Changes samples by a transform from the given one on, and notes the samples that are read."""

    def __init__(self, transform, first):
        super().__init__()
        self.rare_transform, self.first, self.read = transform, first, []

    def __getitem__(self, index):
        self.read.append(index)
        self.transform = self.rare_transform if index >= self.first else None
        return super().__getitem__(index)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda number: number + torch.rand(8),
        lambda: Transform(random.Random(0)),
        lambda: Transform(torch.Generator().manual_seed(0)),
        lambda: Transform(np.random.default_rng(0)),
        lambda: Transform(np.random.RandomState(0)),
    ],
    ids=["that of torch", "of Python", "of torch", "of NumPy", "of NumPy's older kind"],
)
def test_a_read_ahead_that_is_the_first_one_to_draw_is_undone(make):
    first = 13 * BATCH  # the third batch of the first block that is read ahead
    losses, batches = train(DataLoader(RarelyDrawing(make(), first), BATCH))
    numbers = RarelyDrawing(make(), first)
    (watched_losses, watched_batches), account = watched(DataLoader(numbers, BATCH))
    assert torch.equal(watched_batches, batches)
    assert watched_losses == losses
    assert account.why_not_measured == DRAWS_RANDOM
    assert [index for index in range(NUM_SAMPLES) if numbers.read.count(index) == 2] == [*range(first, first + BATCH)]


class Chunks(Sampler):
    """Shuffles each part of the samples when it comes to that."""

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        for start in range(0, NUM_SAMPLES, NUM_SAMPLES // 10):
            yield from (start + torch.randperm(NUM_SAMPLES // 10)).tolist()


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_that_may_draw_between_batches_is_not_read_ahead(num_workers):
    losses, batches = train(DataLoader(Numbers(), BATCH, sampler=Chunks(), num_workers=num_workers))
    (watched_losses, watched_batches), account = watched(
        DataLoader(Numbers(), BATCH, sampler=Chunks(), num_workers=num_workers)
    )
    assert torch.equal(watched_batches, batches)
    assert watched_losses == losses
    assert not account.blocks.at_hand
    assert account.why_not_measured == SAMPLES_BY_CODE


def count_in(module_name):
    """A generator of a function of another module."""
    variables = {"__name__": module_name}
    exec("def count():\n    yield from [1, 2]", variables)
    return variables["count"]()


class Doubling:
    def __call__(self, value):
        return 2 * value


class Counter:
    def __iter__(self):
        return self

    def __next__(self):
        return 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: iter([1, 2]), False),
        (lambda: zip(range(2), iter([1, 2]), strict=True), False),
        (lambda: map(str, [1, 2]), False),
        (lambda: (number for number in [1, 2]), True),
        (lambda: zip(range(2), (number for number in [1, 2]), strict=True), True),
        (lambda: map(from_module, [1, 2]), True),
        (lambda: map(partial(from_module), [1, 2]), True),
        (lambda: map(partial(int, base=3), ["1", "2"]), False),
        (lambda: map(Doubling(), [1, 2]), True),
        (lambda: map(ByClass().plain, [1, 2]), True),
        (lambda: iter(Counter()), True),
        (lambda: count_in("samplers"), True),
        (lambda: count_in("torch.utils.data"), False),
        (lambda: count_in("accelerate.data_loader"), False),
    ],
    ids=[
        "a list",
        "lists",
        "of Python",
        "generator",
        "generator inside",
        "function",
        "partial function",
        "partial of Python",
        "callable object",
        "method",
        "class",
        "module",
        "engine",
        "third party",
    ],
)
def test_the_code_that_an_iterator_runs_for_each_value(make, expected):
    iterator = make()
    next(iterator)
    assert runs_user_code(iterator) == expected


def test_a_generator_that_has_ended_runs_no_code():
    ended = (number for number in [1])
    assert list(ended) == [1]
    assert not runs_user_code(ended)
