"""Own Lightning code of which one rank behaves in another way than the other one: both end soon, and well."""

import time
from pathlib import Path

import pytest

from paceline.tasks.train.rank.checkpoint import newest_valid_checkpoint, step_of, verify
from tests.support.small_disk import fill, small_disk
from tests.support.two_ranks import (
    GROUP_SECONDS,
    SHORT_PATIENCE,
    ended,
    result_of,
    said_by,
    start_ranks,
    start_two,
    train_in_two_processes,
    two_specs,
)

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = [pytest.mark.usefixtures("own_packages"), pytest.mark.filterwarnings("ignore")]  # Lightning's advice

BOTH = -1
END_SECONDS = 120
"""Far less than the half hour for which a rank waits for another one."""
CLI = {"cli": {"class_path": "faulty.FaultyCLI"}}


def settings_of(name, trainer=None, **arguments):
    """Settings of one of the faulty modules."""
    return {
        "seed_everything": 5,
        "model": {"class_path": f"faulty.{name}", "init_args": arguments},
        "data": {"class_path": "more_shapes.Pictures"},
        "trainer": {"max_epochs": 2, "callbacks": [{"class_path": "faulty.Witness"}]} | (trainer or {}),
    }


def fault(place, rank):
    return f"FileNotFoundError: {place}: a file of rank {rank} is not there"


@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("test_step", 1),
        pytest.param("test_step", 0, marks=pytest.mark.slow),
        pytest.param("on_test_end", 1, marks=pytest.mark.slow),
    ],
)
def test_a_test_that_fails_on_one_rank_leaves_a_training_and_its_reason(make_spec, place, rank):
    settings = settings_of("Perceptron", {"max_epochs": 1}, place=place, rank=rank)
    specs, processes = start_two(make_spec, settings=settings, baseline="none")
    with ended(processes):
        assert [process.wait(END_SECONDS) for process in processes] == [0, 0], said_by(specs[0])
    result = result_of(specs[0])
    assert result.not_tested == f"rank {rank}: {fault(place, rank)}"
    assert result.metrics.keys() == {"train/loss", "val/accuracy"}
    assert verify(Path(result.checkpoint))
    assert "in fail" in said_by(specs[rank]), "the traceback"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, BOTH])
def test_an_after_fit_that_fails_is_noted_and_leaves_a_training(make_spec, rank):
    settings = settings_of("Perceptron", place="after_fit", rank=rank) | CLI
    specs, processes = start_two(make_spec, SHORT_PATIENCE, settings=settings, baseline="none")
    with ended(processes):
        assert [process.wait(END_SECONDS) for process in processes] == [0, 0], said_by(specs[0])
    result = result_of(specs[0])
    (note,) = (note for note in result.notes if "after_fit" in note)
    reasons = [f"rank {each}: {fault('after_fit', each)}" for each in (0, 1) if rank in (each, BOTH)]
    assert any(reason in note for reason in reasons)
    assert result.not_tested == (None if rank == BOTH else reasons[0])
    assert ("test/loss" in result.metrics) == (rank == BOTH), "the group is complete where both fail"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rank"),
    [("before_fit", 0), ("before_fit", 1), ("training_step", 0), ("training_step", 1), ("validation_step", 1)],
)
def test_an_error_in_the_training_on_one_rank_ends_both_and_its_callbacks_hear_of_it_once(make_spec, place, rank):
    settings, often = settings_of("Perceptron", place=place, rank=rank) | CLI, {"checkpoint_steps": 2}
    specs, processes = start_two(make_spec, settings=settings, execution=often, baseline="none")
    with ended(processes):
        assert processes[rank].wait(END_SECONDS) == 1
        assert processes[1 - rank].wait(END_SECONDS) == 1
    assert fault(place, rank) in said_by(specs[rank])
    heard = Path(specs[rank].directory) / "exceptions.txt"
    if place == "before_fit":
        assert not heard.exists(), "the trainer did not start"
    else:
        assert heard.read_text() == f"{fault(place, rank)}\n"
    if place == "validation_step":
        assert newest_valid_checkpoint(Path(specs[0].checkpoint_directory)) is not None


@pytest.mark.slow
def test_a_hook_of_rank_0_alone_may_take_longer_than_the_patience_of_a_group(make_spec):
    settings = settings_of("Patient", {"max_epochs": 1}, seconds=GROUP_SECONDS + 3)
    result = train_in_two_processes(make_spec, SHORT_PATIENCE, settings=settings, baseline="none")
    assert result.num_epochs == 1
    assert result.seconds > GROUP_SECONDS


@pytest.mark.slow
def test_a_full_disk_ends_both_ranks_and_the_last_checkpoint_resumes(make_spec):
    options = {"baseline": "none", "execution": {"checkpoint_steps": 1}}
    specs = two_specs(make_spec, settings=settings_of("Perceptron", {"max_epochs": 1000}), **options)
    checkpoints = Path(specs[0].checkpoint_directory)
    with small_disk(checkpoints, megabytes=2) as filler:
        processes = start_ranks(specs)
        with ended(processes):
            give_up = time.monotonic() + END_SECONDS
            while not list(checkpoints.glob("step-*.ckpt")):
                assert time.monotonic() < give_up
                time.sleep(0.05)
            fill(filler)
            assert [process.wait(END_SECONDS) for process in processes] == [1, 1]
        assert "OSError: [Errno 28] No space left on device" in said_by(specs[0])
        filler.unlink()
        last = newest_valid_checkpoint(checkpoints)
        assert last is not None
        assert list(checkpoints.glob("*.tmp")) == []
        end = step_of(last) + 5
        settings = settings_of("Perceptron", {"max_epochs": 1000, "max_steps": end})
        again = two_specs(make_spec, attempt=1, settings=settings, **options)
        processes = start_ranks([spec.model_copy(update={"resume_from": str(last)}) for spec in again])
        with ended(processes):
            assert [process.wait(END_SECONDS) for process in processes] == [0, 0]
    result = result_of(again[0])
    assert result.resumed_from == str(last)
    assert result.num_batches == len(result.losses) == end
