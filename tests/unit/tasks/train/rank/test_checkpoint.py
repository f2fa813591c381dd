import pickle
import threading
from pathlib import Path

import pytest
import torch

from paceline.tasks.errors import RunError, SupersededError
from paceline.tasks.files import sha256_of
from paceline.tasks.train.rank import checkpoint_io
from paceline.tasks.train.rank.checkpoint import checkpoint_path, digest_path, newest_valid_checkpoint, verify
from paceline.tasks.train.rank.checkpoint_io import AtomicCheckpointIO, load, write_with_digest
from tests.support.patience import until
from tests.support.refusals import refused


@pytest.fixture
def saved(tmp_path):
    plugin = AtomicCheckpointIO(tmp_path / "attempt-0")
    for step in (1, 2, 3):
        plugin.save_checkpoint(
            {"step": step, "weights": torch.full((100,), float(step))}, checkpoint_path(tmp_path, step)
        )
    plugin.teardown()
    return tmp_path


def test_the_newest_two_are_kept_and_read_back(saved):
    assert sorted(path.name for path in saved.glob("*.ckpt")) == ["step-0000000002.ckpt", "step-0000000003.ckpt"]
    newest = newest_valid_checkpoint(saved)
    assert load(newest)["step"] == 3


def test_a_truncated_checkpoint_is_set_aside_and_the_one_before_is_used(saved):
    newest = checkpoint_path(saved, 3)
    newest.write_bytes(newest.read_bytes()[:-10])
    assert not verify(newest)
    assert newest_valid_checkpoint(saved) == checkpoint_path(saved, 2)
    assert (saved / "step-0000000003.ckpt.damaged").exists()


def test_a_checkpoint_without_its_digest_is_not_trusted(saved):
    (saved / "step-0000000003.ckpt.sha256").unlink()
    assert newest_valid_checkpoint(saved) == checkpoint_path(saved, 2)


def test_no_checkpoint_is_none(tmp_path):
    assert newest_valid_checkpoint(tmp_path) is None
    assert newest_valid_checkpoint(tmp_path / "absent") is None


def test_a_failed_write_leaves_the_older_ones_valid(saved, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    plugin = AtomicCheckpointIO(saved / "attempt-0")
    plugin.save_checkpoint({"step": 4}, checkpoint_path(saved, 4))
    with pytest.raises(OSError, match="No space"):
        until(plugin.is_idle, "end of the write", seconds=10)
    assert newest_valid_checkpoint(saved) == checkpoint_path(saved, 3)
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]
    plugin.teardown()  # reports it once


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()

    def write_later(*arguments):
        assert may_write.wait(10)
        write_with_digest(*arguments)

    monkeypatch.setattr(checkpoint_io, "write_with_digest", write_later)
    plugin, module = AtomicCheckpointIO(tmp_path / "attempt-0"), torch.nn.BatchNorm1d(2)
    plugin.save_checkpoint({"network": module.state_dict(), "epochs": (epochs := [1])}, checkpoint_path(tmp_path, 1))
    epochs.append(2)  # the next steps change lists and weights before they are written
    module.weight.data.zero_()
    assert not plugin.is_idle()
    assert newest_valid_checkpoint(tmp_path) is None
    may_write.set()
    plugin.wait()
    saved = load(newest_valid_checkpoint(tmp_path))
    assert saved["epochs"] == [1]
    assert saved["network"]["weight"].tolist() == [1, 1]
    assert saved["network"]._metadata == module.state_dict()._metadata, "modules read their version"


def test_an_attempt_that_was_superseded_writes_no_checkpoint(saved):
    (saved / "attempt-1").mkdir()
    path = checkpoint_path(saved, 3)
    before = path.read_bytes(), digest_path(path).read_text()
    plugin = AtomicCheckpointIO(saved / "attempt-0")
    plugin.save_checkpoint({"step": 3, "other": 1}, path)
    with pytest.raises(SupersededError, match=r"attempt-0 .* attempt-1\b"):
        plugin.teardown()
    assert (path.read_bytes(), digest_path(path).read_text()) == before
    plugin = AtomicCheckpointIO(saved / "attempt-1")
    plugin.save_checkpoint({"step": 4}, checkpoint_path(saved, 4))
    plugin.teardown()
    assert newest_valid_checkpoint(saved) == checkpoint_path(saved, 4)


class Evil:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_planted_checkpoint_is_refused_and_nothing_of_it_is_executed(tmp_path):
    path = checkpoint_path(tmp_path, 1)
    for protocol, content in ((2, {"x": Evil(tmp_path / "pwned")}), (4, Evil(tmp_path / "pwned"))):
        torch.save(content, path, pickle_protocol=protocol)
        digest_path(path).write_text(sha256_of(path))
        assert newest_valid_checkpoint(tmp_path) == path, "who can write it can write its digest"
        for read in (load, AtomicCheckpointIO(tmp_path / "attempt-0").load_checkpoint):
            with refused(None, path, kind=RunError) as caught:
                read(path)
            assert "weights_only" not in str(caught.value), "torch advises to load it all the same"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
    with refused(None, path, kind=RunError):
        load(path)
    assert not (tmp_path / "pwned").exists()
