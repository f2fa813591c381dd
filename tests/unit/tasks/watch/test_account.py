"""The account of a loop that others wrote: the same losses and batches, parts that add up, the planted cause."""

import random
import sys
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from paceline.tasks.measure.validity import judge as judge_validity
from paceline.tasks.records.measurement import Validity
from paceline.tasks.train.rank import time_budget
from paceline.tasks.watch import account as module
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.card import card
from paceline.tasks.watch.hooks import follow
from paceline.tasks.watch.records import PARTS, Step
from paceline.tasks.watch.verdict import judge

NUM_SAMPLES, BATCH = 480, 4
QUIET = judge_validity(Validity(foreign_load=0.0, num_cores=2))


class Clock:
    """A time that passes as tests say, and by a microsecond for each look at it."""

    def __init__(self):
        self.now = self.busy = 0.0

    def monotonic(self):
        self.work(1e-6)
        return self.now

    def thread_time(self):
        return self.busy

    def sleep(self, seconds):
        self.now += seconds

    def work(self, seconds):
        self.now += seconds
        self.busy += seconds


CLOCK = Clock()


class Numbers(Dataset):
    """Samples that take a time to read, and may draw random numbers."""

    def __init__(self, *, seconds=0.0, draw=None, bad=None):
        self.seconds, self.draw, self.bad = seconds, draw, bad

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"sample {index} is broken")
        if self.seconds:
            CLOCK.sleep(self.seconds)
        noise = self.draw() if self.draw else 0.0
        return torch.full((8,), index / NUM_SAMPLES) + noise, torch.tensor([float(index % 2)])


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


class Stream(IterableDataset):
    def __iter__(self):
        return (Numbers()[index] for index in range(NUM_SAMPLES))


def train(loader, num_epochs=1, *, in_work=0.001, in_step=0.0, in_loop=0.0, limit=None, validation=None):
    """A plain loop; returns its losses and the batches it saw."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, seen = [], []
    for _ in range(num_epochs):
        for number, (inputs, targets) in enumerate(islice(loader, limit)):
            seen.append(inputs.clone())
            CLOCK.sleep(in_step)
            CLOCK.work(in_work)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            CLOCK.sleep(in_loop)
            if validation is not None and number % 10 == 9:
                with torch.no_grad():
                    losses += [float(model(inputs).sum()) for inputs, _ in validation]
    return losses, torch.stack(seen)


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(module, "TARGET_HALF_WIDTH", 0.5)


def watched(loader, *arguments, **options):
    account = Account()
    with follow(account):
        outcome = train(loader, *arguments, **options)
    account.stop()
    account.validity = QUIET
    return outcome, account


class QuietWatch:
    def __init__(self, pids):
        pass

    def stop(self):
        return QUIET


class Half(Sampler):
    """The first half of the samples; a sampler need not have a length."""

    def __iter__(self):
        return iter(range(NUM_SAMPLES // 2))


LOADERS = {
    "by a sampler without length": lambda **options: DataLoader(
        Numbers(**options), BATCH, sampler=Half(), num_workers=1
    ),
    "in this process": lambda **options: DataLoader(Numbers(**options), BATCH, shuffle=True),
    "in workers": lambda **options: DataLoader(Numbers(**options), BATCH, shuffle=True, num_workers=1),
    "with a generator": lambda **options: DataLoader(
        Numbers(**options), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "a stream": lambda: DataLoader(Stream(), BATCH),
}


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("kind", LOADERS)
def test_losses_and_batches_stay_the_same(kind):
    losses, batches = train(LOADERS[kind](), 2)
    (watched_losses, watched_batches), account = watched(LOADERS[kind](), 2)
    assert watched_losses == losses
    assert torch.equal(watched_batches, batches)
    assert account.num_steps == len(losses)
    assert bool(account.blocks.at_hand) == (kind != "a stream")


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(8)], ids=["python", "torch"])
def test_a_loader_that_draws_in_this_process_is_not_read_ahead(draw):
    random.seed(5)
    losses, _ = train(LOADERS["in this process"](draw=draw))
    random.seed(5)
    (watched_losses, _), account = watched(LOADERS["in this process"](draw=draw))
    assert watched_losses == losses
    assert not account.blocks.at_hand
    assert len(account.blocks.normal) > 2
    assert account.why_not_measured == "the loader draws random numbers in the process of the training"


@pytest.mark.usefixtures("short_blocks")
def test_a_loader_that_draws_late_ends_the_replay():
    drawing = Numbers()
    loader = DataLoader(drawing, BATCH)
    account, seen = Account(), []
    with follow(account):
        weight = torch.zeros(1, requires_grad=True)
        for number, (inputs, _) in enumerate(loader):
            (weight * inputs.sum()).sum().backward()
            seen.append(float(inputs.sum()))
            if number == 60:
                drawing.draw = random.random
    account.stop()
    assert seen[:60] == [float(inputs.sum()) for inputs, _ in islice(DataLoader(Numbers(), BATCH), 60)]
    assert account.why_not_measured
    assert not account.blocks.at_hand


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("bad", [200, 215, 260])
def test_a_broken_sample_fails_at_its_own_step(bad):
    def steps(done):
        weight = torch.zeros(1, requires_grad=True)
        for inputs, _ in DataLoader(Numbers(bad=bad), BATCH):
            (weight * inputs.sum()).sum().backward()
            done.append(float(inputs.sum()))

    expected, done = [], []
    with pytest.raises(ValueError, match=f"sample {bad} is broken"):
        steps(expected)
    with follow(Account()), pytest.raises(ValueError, match=f"sample {bad} is broken"):
        steps(done)
    assert done == expected


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
def test_the_length_of_a_loader_is_read_rarely_and_without_effect(find_length, reason, num_workers):
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


@pytest.mark.usefixtures("short_blocks")
def test_epochs_that_end_early_and_a_validation_between():
    validation = [DataLoader(Numbers(), 120) for _ in range(2)]
    losses, batches = train(LOADERS["in workers"](), 3, limit=35, validation=validation[0])
    (watched_losses, watched_batches), account = watched(LOADERS["in workers"](), 3, limit=35, validation=validation[1])
    assert watched_losses == losses
    assert torch.equal(watched_batches, batches)
    assert account.num_steps == 3 * 35
    assert account.why_not_measured == ""


@pytest.fixture
def clock(monkeypatch):
    for owner in (module, time_budget):
        monkeypatch.setattr(owner, "time", CLOCK)
    return CLOCK


PLANTED = {
    "data-bound": ({"seconds": 0.002}, {}),
    "wait-bound": ({}, {"in_step": 0.008}),
    "loop-bound": ({}, {"in_loop": 0.008}),
    "compute-bound": ({}, {"in_work": 0.008}),
    "launch-bound": ({}, {"in_work": 0.004}),
}


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("cause", PLANTED)
def test_the_planted_cause(cause, clock):
    of_data, of_loop = PLANTED[cause]
    before = clock.now
    _, account = watched(LOADERS["in this process"](**of_data), **of_loop)
    elapsed = clock.now - before
    result = judge(account, "train.py")
    assert result.cause == cause
    assert tuple(result.parts) == PARTS
    assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
    assert sum(share.value for share in result.shares.values()) == pytest.approx(1.0, abs=0.01)
    assert sum(result.time_budget.values()) == pytest.approx(elapsed, abs=1e-4)
    sources = {"data-bound": "measured", "wait-bound": "at most", "loop-bound": "at most"}
    assert result.gain_source == sources.get(cause)
    assert result.why_no_share == ""
    text = "\n".join(card(result))
    assert f"verdict  {cause}: " in text
    assert "next  " in text
    if result.gain is not None:  # 9 ms in a step of 9 ms, less its work of 1 ms
        assert result.gain.value == pytest.approx(9.0, rel=0.05)
        assert result.gain.low == pytest.approx(9.0, rel=0.05)


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
def test_steps_with_a_validation_or_a_skipped_batch_are_left_out(clock):
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


def test_a_busy_machine_gets_no_cause_and_no_gain():
    _, account = watched(LOADERS["in this process"](seconds=0.0005))
    account.validity = judge_validity(Validity(foreign_load=1.5, num_cores=2))
    result = judge(account, "train.py")
    assert (result.cause, result.gain, result.of_limit) == ("contaminated machine", None, None)
    assert result.verdict == (
        "refused: the machine was disturbed meanwhile (1.50 of 2 cores busy with other processes (limit 0.25))"
    )


@pytest.mark.usefixtures("short_blocks")
def test_an_attempt_on_a_busy_machine_starts_again(monkeypatch):
    contaminated = iter([True] + 50 * [False])

    class Watch:
        def __init__(self, pids):
            pass

        def stop(self):
            return Validity(contaminated=next(contaminated))

    monkeypatch.setattr(module, "ValidityWatch", Watch)
    (losses, _), account = watched(LOADERS["in this process"](), 3)
    assert losses == train(LOADERS["in this process"](), 3)[0]
    assert account.num_rounds >= 8
    assert next(contaminated) is False


@pytest.mark.usefixtures("short_blocks")
def test_an_account_that_is_done_waits_for_no_gpu(monkeypatch):
    num_waits, waits = 0, []

    def synchronize():
        nonlocal num_waits
        num_waits += 1

    monkeypatch.setattr(module, "ValidityWatch", QuietWatch)
    for name, function in (
        ("is_initialized", lambda: True),
        ("synchronize", synchronize),
        ("get_rng_state", torch.get_rng_state),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    account, weight = Account(), torch.ones(8, 1, requires_grad=True)
    with follow(account):
        for inputs, _ in islice(DataLoader(Numbers(), 1), 300):
            (inputs @ weight).sum().backward()
            waits.append((account._is_done, num_waits))
    num_at_end = {number for is_done, number in waits if is_done}
    assert len(num_at_end) == 1
    assert num_at_end.pop() > len(account.split) > 0
    assert len([0 for is_done, _ in waits if is_done]) > 50


def test_the_rate_on_a_gpu_is_that_of_the_steps_that_do_not_wait_for_it():
    account = Account()
    names = dict.fromkeys(PARTS, 0.0)
    account.num_steps, account.validity = 100, QUIET
    step, split = (
        Step(names | {"forward": forward, "backward": 2 * forward, "data_wait": forward}, 0.0, 8)
        for forward in (0.001, 0.003)
    )
    account.blocks.normal.extend([[step] * 3] * 10)
    account.split = [split] * 10
    result = judge(account, "train.py")
    assert result.step_seconds == pytest.approx(0.004)
    assert result.samples_per_second == pytest.approx(2000)
    expected = {"data_wait": 0.001, "forward": 0.001, "backward": 0.002, "transfer": 0, "optimizer": 0, "rest": 0}
    assert result.parts == pytest.approx(expected)
    assert result.shares["input"].value == pytest.approx(0.25)


def test_two_optimizers_and_a_closure():
    account, loader = Account(), LOADERS["in this process"]()
    first, second = nn.Linear(8, 1), nn.Linear(8, 1)
    plain = torch.optim.SGD(first.parameters(), lr=0.01)
    searching = torch.optim.LBFGS(second.parameters(), lr=0.01, max_iter=2)
    with follow(account):
        for inputs, targets in loader:
            plain.zero_grad()
            nn.functional.mse_loss(first(inputs), targets).backward()
            plain.step()

            def closure(inputs=inputs, targets=targets):
                searching.zero_grad()
                loss = nn.functional.mse_loss(second(inputs), targets)
                loss.backward()
                return loss

            searching.step(closure)
    account.stop()
    budget = account.time_budget
    assert account.num_steps == len(loader)
    assert account.num_backward > 2 * len(loader)
    assert min(budget[part] for part in ("forward", "backward", "optimizer")) > 0


def test_a_loop_without_a_loader_has_no_steps():
    account, weight = Account(), torch.ones(1, requires_grad=True)
    with follow(account):
        (2 * weight).backward()
    account.stop()
    assert (account.num_steps, account.num_backward, judge(account, "train.py")) == (0, 1, None)


def test_hooks_are_gone_afterwards():
    before = DataLoader.__iter__, torch.autograd.backward
    with follow(Account()), follow(Account()):
        assert DataLoader.__iter__ is not before[0]
    assert (DataLoader.__iter__, torch.autograd.backward) == before
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks


def test_a_smaller_last_batch_does_not_stand_for_all():
    account, weight = Account(), torch.ones(8, 1, requires_grad=True)
    with follow(account):
        for inputs, _ in DataLoader(Numbers(), batch_size=7):
            (inputs @ weight).sum().backward()
    assert len(inputs) == 4
    account.stop()
    account.validity = QUIET
    result = judge(account, "train.py")
    assert result.samples_per_second == pytest.approx(7 / result.step_seconds)
