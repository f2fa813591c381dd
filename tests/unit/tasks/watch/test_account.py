"""The account of a loop that others wrote: the same losses and batches, parts that add up, the planted cause."""

import random
import sys
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from paceline.tasks.measure.validity import judge as judge_validity
from paceline.tasks.records.measurement import Validity
from paceline.tasks.watch import account as module
from paceline.tasks.watch.account import Account
from paceline.tasks.watch.card import card
from paceline.tasks.watch.hooks import follow
from paceline.tasks.watch.records import PARTS, Step
from paceline.tasks.watch.verdict import judge
from tests.support.watched_loops import BATCH, NUM_SAMPLES, QUIET, Numbers, QuietWatch, train, watched


class Stream(IterableDataset):
    def __iter__(self):
        return (Numbers()[index] for index in range(NUM_SAMPLES))


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


@pytest.mark.usefixtures("short_blocks")
def test_epochs_that_end_early_and_a_validation_between():
    validation = [DataLoader(Numbers(), 120) for _ in range(2)]
    losses, batches = train(LOADERS["in workers"](), 3, limit=35, validation=validation[0])
    (watched_losses, watched_batches), account = watched(LOADERS["in workers"](), 3, limit=35, validation=validation[1])
    assert watched_losses == losses
    assert torch.equal(watched_batches, batches)
    assert account.num_steps == 3 * 35
    assert account.why_not_measured == ""


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


@pytest.mark.usefixtures("short_blocks")
def test_steps_of_another_kind_leave_a_finished_measurement(monkeypatch):
    monkeypatch.setattr(module, "ValidityWatch", QuietWatch)
    account, weight = Account(), torch.ones(8, 1, requires_grad=True)
    with follow(account):
        for inputs, _ in islice(DataLoader(Numbers(), 1), 300):
            (inputs @ weight).sum().backward()
        measured = [*account.blocks.normal]
        for (first, _), (second, _) in islice(zip(*(DataLoader(Numbers(), 1) for _ in range(2)), strict=True), 10):
            ((first + second) @ weight).sum().backward()
    assert measured
    assert (account.blocks.normal, account.why_not_measured) == (measured, "")


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
    account.num_ranks = 2
    assert judge(account, "train.py").samples_per_second == pytest.approx(4000)
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
