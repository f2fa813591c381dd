import pickle

import pytest
import torch

from tasks.train.checkpoint import checkpoint_path, newest_verified, verify
from tasks.train.checkpoint_io import AtomicCheckpointIO, load


@pytest.fixture
def saved(tmp_path):
    plugin = AtomicCheckpointIO()
    for step in (1, 2, 3):
        plugin.save_checkpoint(
            {"step": step, "weights": torch.full((100,), float(step))}, checkpoint_path(tmp_path, step)
        )
    return tmp_path


def test_the_newest_two_are_kept_and_read_back(saved):
    assert sorted(path.name for path in saved.glob("*.ckpt")) == ["step-0000000002.ckpt", "step-0000000003.ckpt"]
    newest = newest_verified(saved)
    assert load(newest)["step"] == 3


def test_a_truncated_checkpoint_is_set_aside_and_the_one_before_is_used(saved):
    newest = checkpoint_path(saved, 3)
    newest.write_bytes(newest.read_bytes()[:-10])
    assert not verify(newest)
    assert newest_verified(saved) == checkpoint_path(saved, 2)
    assert (saved / "step-0000000003.ckpt.damaged").exists()


def test_a_checkpoint_without_its_digest_is_not_trusted(saved):
    (saved / "step-0000000003.ckpt.sha256").unlink()
    assert newest_verified(saved) == checkpoint_path(saved, 2)


def test_no_checkpoint_is_none(tmp_path):
    assert newest_verified(tmp_path) is None
    assert newest_verified(tmp_path / "absent") is None


def test_a_failed_write_leaves_the_older_ones_valid(saved, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        AtomicCheckpointIO().save_checkpoint({"step": 4}, checkpoint_path(saved, 4))
    assert newest_verified(saved) == checkpoint_path(saved, 3)
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_loading_executes_no_code(tmp_path, capsys):
    path = tmp_path / "evil.ckpt"
    torch.save({"x": Evil()}, path)
    with pytest.raises(pickle.UnpicklingError):
        load(path)
    assert "executed" not in capsys.readouterr().out
