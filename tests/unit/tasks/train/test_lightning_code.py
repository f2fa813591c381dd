"""What a stored configuration of own Lightning code may import, and the checkpoint that a run starts from."""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.conf.lightning import Lightning
from paceline.tasks.errors import InputError
from paceline.tasks.files import sha256_of
from paceline.tasks.train.lightning import code
from paceline.tasks.train.lightning.child import Request, _do
from paceline.tasks.train.lightning.code import (
    FOLDER,
    LIST,
    START_CHECKPOINT,
    check_directory,
    copy,
    copy_checkpoint,
    copy_own,
    identities,
    link_written,
    list_written,
    require_named,
    source_digest,
    with_absolute_paths,
)
from tests.support.refusals import refused

RECORDED = ("directory (code 0123)", "PyYAML 6.0 (code 4567)", "tagger (code 89ab)")


@pytest.mark.parametrize(
    ("class_path", "is_allowed"),
    [
        ("yaml.YAMLObject", True),
        ("tagger.Tagger", True),
        ("local.Notes", True),
        ("torch.nn.GELU", True),
        ("lightning.pytorch.callbacks.Timer", True),
        ("torchmetrics.Accuracy", True),
        ("os.system", False),
        ("numpy.load", False),
        ("another.Tagger", False),
    ],
)
def test_stored_settings_import_from_recorded_packages_only(tmp_path, class_path, is_allowed):
    (tmp_path / "local.py").touch()
    inner = {"class_path": "torch.nn.Sequential", "init_args": {"args": [{"class_path": class_path}]}}
    settings = {"model": {"class_path": "tagger.Tagger", "init_args": {"layers": [inner]}}}
    if is_allowed:
        require_named(settings, RECORDED, tmp_path)
    else:
        with refused("class_path", f"class_path={class_path}"):
            require_named(settings, RECORDED, tmp_path)


def test_a_checkpoint_is_the_one_that_was_read(tmp_path):
    source = tmp_path / "first.ckpt"
    source.write_bytes(b"first")
    digest = sha256_of(source)
    copy_checkpoint(source, tmp_path / "run", digest)
    source.write_bytes(b"second")
    copy_checkpoint(source, tmp_path / "run", digest)  # it is there
    assert (tmp_path / "run" / START_CHECKPOINT).read_bytes() == b"first"
    with refused("ckpt_path", f"ckpt_path={source}"):
        copy_checkpoint(source, tmp_path / "another", digest)


def test_what_trainings_write_beside_the_code_does_not_change_it(tmp_path, monkeypatch):
    directory = tmp_path / "code"
    home = directory / "home"
    (directory / "tagger").mkdir(parents=True)
    (directory / "tagger" / "net.py").write_text("WIDTH = 8\n")
    monkeypatch.setenv("PACELINE_HOME", str(home))
    before = identities({}, directory)
    outputs = (
        "home/runs/1/rank.py",
        "lightning_logs/0/metrics.csv",
        "mlruns/0/meta.yaml",
        "mlflow.db-wal",
        ".git/HEAD",
    )
    for written in outputs:
        (directory / written).parent.mkdir(parents=True, exist_ok=True)
        (directory / written).write_text("written by a training\n")
    assert identities({}, directory) == before
    copy(directory, home / "runs" / "1")
    copied = home / "runs" / "1" / FOLDER
    assert {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()} == {"tagger/net.py", LIST}
    assert identities({}, copied) == before, "the copy lies in PACELINE_HOME"
    (directory / "tagger" / "net.py").write_text("WIDTH = 16\n")
    assert identities({}, directory) != before


@pytest.mark.parametrize("name", ["run.log", "slurm-17.out", "models/best.ckpt"])
def test_what_a_shell_slurm_or_a_callback_writes_is_linked_and_no_code(tmp_path, name):
    directory, run = tmp_path / "code", tmp_path / "runs" / "1"
    (directory / "models").mkdir(parents=True)
    (directory / "net.py").touch()
    (before,) = identities({}, directory)
    (directory / name).write_text("first")
    copy(directory, run, identity=before)
    with (directory / name).open("a") as file:
        file.write(", second")
    assert (run / FOLDER / name).read_text() == "first, second"
    assert identities({}, directory) == identities({}, run / FOLDER) == (before,)


def test_a_copy_keeps_scripts_executable_and_names_in_another_encoding(tmp_path):
    directory, run = tmp_path / "code", tmp_path / "runs" / "1"
    directory.mkdir()
    (directory / "net.py").touch()
    name = os.fsdecode(b"caf\xe9.sh")
    (directory / name).write_text("#!/bin/sh\necho 5\n")
    (directory / name).chmod(0o755)
    (identity,) = identities({}, directory)
    copy(directory, run, identity=identity)
    assert os.access(run / FOLDER / name, os.X_OK)
    assert not os.access(run / FOLDER / "net.py", os.X_OK)
    assert identities({}, run / FOLDER) == (identity,)


def test_a_copy_and_copies_of_it_have_the_folders_without_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    directory, runs = tmp_path / "code", tmp_path / "home" / "runs"
    outputs = directory / "results" / "epochs"
    (directory / "net").mkdir(parents=True)
    (directory / "net" / "layers.py").touch()
    before = identities({}, directory)
    outputs.mkdir(parents=True)
    (outputs / ".gitkeep").touch()
    for name in (".git", "__pycache__", "lightning_logs"):
        (directory / name).mkdir()
    copy(directory, runs / "1")
    copied = runs / "1" / FOLDER
    (copied / "results" / "epochs" / "x.txt").touch()
    copy(copied, runs / "2")
    list_written(copied)
    copy(copied, runs / "3")
    for number in ("1", "2", "3"):
        copied = runs / number / FOLDER
        folders = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_dir()}
        assert folders == {"net", "results", "results/epochs"}
        assert not (copied / "results" / "epochs").is_symlink()
        assert identities({}, copied) == before
    assert list((runs / "2" / FOLDER / "results" / "epochs").iterdir()) == []


def test_an_older_copy_without_a_list_of_folders_is_copied(tmp_path):
    directory, runs = tmp_path / "code", tmp_path / "runs"
    directory.mkdir()
    (directory / "net.py").touch()
    copy(directory, runs / "1")
    (runs / "1" / FOLDER / LIST).write_text('[["net.py"], []]')
    copy(runs / "1" / FOLDER, runs / "2")
    assert (runs / "2" / FOLDER / "net.py").exists()


def test_code_that_changes_between_its_reading_and_its_copy_is_refused(tmp_path):
    directory, run = tmp_path / "code", tmp_path / "run"
    directory.mkdir()
    (directory / "net.py").write_text("WIDTH = 8\n")
    (identity,) = identities({}, directory)
    (directory / "net.py").write_text("WIDTH = 16\n")
    with pytest.raises(InputError, match="has changed since it was read") as refusal:
        copy(directory, run, identity=identity)
    assert "start again" in refusal.value.hint
    assert not (run / FOLDER).exists()
    (directory / "net.py").write_text("WIDTH = 8\n")
    copy(directory, run, identity=identity)
    assert (run / FOLDER / "net.py").read_text() == "WIDTH = 8\n"


def test_code_below_the_home_is_no_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    directory = tmp_path / "project" / FOLDER
    (directory / "lightning_logs").mkdir(parents=True)
    (directory / "net.py").touch()
    before = identities({}, directory)
    (directory / "lightning_logs" / "metrics.csv").touch()
    assert identities({}, directory) == before


@pytest.mark.parametrize("section", ["data", "trainer"])
def test_data_in_the_directory_of_the_code_are_linked_and_not_counted(tmp_path, monkeypatch, section):
    directory, run = tmp_path / "code", tmp_path / "home" / "runs" / "1"
    directory.mkdir()
    (directory / "net.py").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(directory)
    monkeypatch.setattr(code, "MAX_BYTES", 8)
    settings = {"data": {"init_args": {"places": ["pictures", ".", "net"]}}}
    settings = settings if section == "data" else {"trainer": {"default_root_dir": str(directory / "pictures")}}
    before = identities(settings, directory)
    (directory / "pictures" / "train").mkdir(parents=True)
    (directory / "pictures" / "train" / "0.png").write_bytes(bytes(9))
    assert identities(settings, directory) == before
    with refused("--code", str(directory)):
        identities({}, directory)
    copy_own(Lightning(settings=settings, code=str(directory)), run)
    copy_own(Lightning(settings=settings, code=str(directory)), run.with_name("2"), run)
    for copied in (run / FOLDER, run.with_name("2") / FOLDER):
        assert identities({}, copied) == identities(settings, copied) == before
        assert (copied / "pictures").resolve() == directory / "pictures"
    (directory / "pictures" / "train" / "label.py").touch()
    with refused("--code", str(directory)):
        identities(settings, directory)


def test_linked_code_is_copied_and_linked_data_are_linked(tmp_path, monkeypatch):
    directory, run = tmp_path / "code", tmp_path / "home" / "runs" / "1"
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for folder in (directory, tmp_path / "common", tmp_path / "pictures"):
        folder.mkdir()
    (directory / "net.py").touch()
    (tmp_path / "common" / "layers.py").touch()
    (tmp_path / "common" / "back").symlink_to(directory)
    (tmp_path / "pictures" / "0.png").touch()
    for name, target in (("common", "common"), ("again", "common"), ("pictures", "pictures")):
        (directory / name).symlink_to(tmp_path / target)
    before = identities({}, directory)
    copy(directory, run)
    copied = run / FOLDER
    files = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert files == {"net.py", "common/layers.py", "again/layers.py", LIST}
    assert (copied / "pictures").resolve() == tmp_path / "pictures"
    assert identities({}, copied) == before
    (tmp_path / "common" / "layers.py").write_text("WIDTH = 8")
    assert identities({}, directory) != before == identities({}, copied)


def test_a_directory_of_code_may_have_it_in_a_linked_folder_alone(tmp_path):
    directory, common = tmp_path / "code", tmp_path / "common"
    for folder in (directory, common):
        folder.mkdir()
    (directory / "common").symlink_to(common)
    with refused("--code", str(directory)):
        check_directory(directory)
    (common / "net.py").touch()
    check_directory(directory)


def test_a_linked_directory_of_data_may_hold_a_script(tmp_path, monkeypatch):
    directory, run = tmp_path / "code", tmp_path / "home" / "runs" / "1"
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(code, "MAX_BYTES", 8)
    for folder in (directory, tmp_path / "disk"):
        folder.mkdir()
    (directory / "net.py").touch()
    (tmp_path / "disk" / "prepare.py").touch()
    (tmp_path / "disk" / "0.png").write_bytes(bytes(9))
    (directory / "pictures").symlink_to(tmp_path / "disk")
    with refused("--code", str(directory)):
        identities({}, directory)
    settings = {"data": {"init_args": {"root": "code/pictures"}}}
    before = identities(settings, directory)
    copy_own(Lightning(settings=settings, code=str(directory)), run)
    assert (run / FOLDER / "pictures").resolve() == tmp_path / "disk"
    assert identities({}, run / FOLDER) == before


def test_links_to_what_holds_the_code_and_virtual_environments_are_left_out(tmp_path, monkeypatch):
    directory, run = tmp_path / "code", tmp_path / "home" / "runs" / "1"
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for folder in (directory / "env", tmp_path / "env"):
        folder.mkdir(parents=True)
        (folder / "pyvenv.cfg").touch()
        (folder / "module.py").touch()
    (directory / "net.py").touch()
    (tmp_path / "other.py").touch()
    (directory / "up").symlink_to("..")
    (directory / "linked").symlink_to(tmp_path / "env")
    copy(directory, run)
    assert {path.name for path in (run / FOLDER).iterdir()} == {"net.py", LIST}


def test_what_a_training_writes_next_to_its_code_is_no_code(tmp_path, monkeypatch):
    directory, run = tmp_path / "code", tmp_path / "home" / "runs" / "1"
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    directory.mkdir()
    (directory / "net.py").touch()
    copy(directory, run)
    (run / FOLDER / "samples").mkdir()
    (run / FOLDER / "samples" / "0.png").write_bytes(b"0")
    assert identities({}, run / FOLDER) == identities({}, directory)
    (run / FOLDER / "net.py").unlink()
    assert identities({}, run / FOLDER) != identities({}, directory)


@pytest.mark.parametrize("exists", [False, True])
def test_what_prepare_data_writes_next_to_the_code_is_linked(tmp_path, monkeypatch, exists):
    directory, copied = tmp_path / "code", tmp_path / "home" / "runs" / "1" / FOLDER
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    (directory / "net").mkdir(parents=True)
    (directory / "net" / "layers.py").touch()
    if exists:
        (directory / "data").mkdir()
        (directory / "data" / ".gitkeep").touch()
    copy(directory, copied.parent)
    before = identities({}, copied)
    with link_written(directory, copied):
        (directory / "data" / "raw").mkdir(parents=True)
        (directory / "data" / "raw" / "x.pt").touch()
        (directory / "net" / "cache.bin").touch()
    with link_written(directory, copied):
        pass
    (copied / "other").mkdir()
    (copied / "other" / "y.pt").touch()
    (copied / "other" / "z.pt").touch()
    list_written(copied)
    assert (copied / "data").readlink() == directory / "data"
    assert (copied / "net" / "cache.bin").readlink() == directory / "net" / "cache.bin"
    assert not (copied / "net").is_symlink()
    copy(copied, copied.parents[1] / "2")
    trial = copied.parents[1] / "2" / FOLDER
    assert (trial / "data").resolve() == directory / "data"
    assert (trial / "net" / "cache.bin").resolve() == directory / "net" / "cache.bin"
    assert (trial / "other").resolve() == copied / "other"
    assert identities({}, copied) == identities({}, trial) == before


def test_code_that_is_new_after_the_copy_is_not_linked(tmp_path):
    directory, copied = tmp_path / "code", tmp_path / "run" / FOLDER
    directory.mkdir()
    (directory / "net.py").touch()
    copy(directory, copied.parent)
    (directory / "helpers.py").touch()
    with link_written(directory, copied):
        pass
    assert not (copied / "helpers.py").exists()


def test_what_this_user_may_not_read_is_left_out(monkeypatch):
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        monkeypatch.setenv("PACELINE_HOME", str(directory / "home"))
        (directory / "net.py").touch()
        before = identities({}, directory)
        (directory / "private").mkdir()
        (directory / "private" / "net.py").touch()
        assert identities({}, directory) != before
        (directory / "private").chmod(0)
        (directory / "link").symlink_to("private/net.py")
        (directory / "key.txt").touch(mode=0)
        directory.chmod(0o755)
        if is_root:
            os.setresuid(65534, 65534, 0)
        try:
            assert identities({}, directory) == before
        finally:
            if is_root:
                os.setresuid(0, 0, 0)
            (directory / "private").chmod(0o700)


def test_the_command_line_can_unset_the_checkpoint_of_a_file(tmp_path):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    file = tmp_path / "config.yaml"
    file.write_text("ckpt_path: gone.ckpt")
    for given in ("", "null"):
        assert _do(Request(task="parse", file=str(file), ckpt_path=given))["ckpt_path"] is None
    with pytest.raises(InputError, match=r"ckpt_path=gone\.ckpt is not a file"):
        _do(Request(task="parse", file=str(file)))
    for word in ("last", "best", "hpc"):  # of Lightning, for files of ModelCheckpoint
        with pytest.raises(InputError, match=f"ckpt_path={word} is not a file") as refusal:
            _do(Request(task="parse", file=str(file), ckpt_path=word))
        assert "ckpt_path=checkpoints/last.ckpt" in refusal.value.hint


@pytest.mark.parametrize("task", ["parse", "predict"])
def test_a_remote_checkpoint_is_refused_as_it_was_typed(task):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    remote = "s3://bucket/last.ckpt"
    with refused("ckpt_path", f"ckpt_path={remote}") as refusal:
        _do(Request(task=task, ckpt_path=remote))
    assert "ckpt_path=last.ckpt" in refusal.value.hint


def test_the_code_of_data_is_its_module_and_what_that_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {
        "tables": "import shelves\n\ndef prepare():\n    from parts import scale, units",
        "shelves": "wide = 3",
        "parts/__init__": "",
        "parts/scale": "from . import base",
        "parts/base": "scale = 1",
        "parts/units": "def read():\n    import torch.nn, late",
        "parts/other": "",
        "late": "import another_language",
        "another_language": "print 1",
        "tokens": "x = 1",
        "model": "import tables",
    }
    data = {"class_path": "tables.Tables", "init_args": {"split": [{"class_path": "tokens.Words"}]}}

    def digest(**changes):
        for name, text in (texts | changes).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        return source_digest(data, tmp_path)

    first, others = digest(), {"model", "parts/other"}
    assert {name for name, text in texts.items() if digest(**{name: f"{text}\n# changed"}) != first} == {
        *texts
    } - others
    assert "late" not in sys.modules
    assert "parts" not in sys.modules


def test_the_same_name_in_another_directory_names_other_data(tmp_path, monkeypatch):
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    place = str(tmp_path / "here" / "data")
    tree = {"init_args": {"places": ["data", "../here/data", place, "gone", ""], "n": 3, "name": None}}
    known = {"init_args": {"places": [place, place, place, "gone", ""], "n": 3, "name": None}}
    assert with_absolute_paths(tree) == known
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(tree) == {"init_args": tree["init_args"]}


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ([], "no key"),
        (["a", "b", "a"], "'a'"),
        (["a/b"], "'a/b'"),
        ([".."], "'..'"),
        (["a.tmp"], "'a.tmp'"),
        ([3], "3"),
        ([{"file": "a"}], "{'file': 'a'}"),
        ("train", "'train', which is not a list"),
        (7, "7, which is not a list"),
    ],
)
def test_keys_of_partitions_are_names_of_folders(keys, fault):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    from paceline.tasks.train.lightning.cli import partition_keys

    with pytest.raises(InputError) as caught:
        partition_keys(SimpleNamespace(partitions=lambda: keys))
    assert fault in str(caught.value)
    assert caught.value.hint
    names = ["2026-11-26", "page_1.txt"]
    assert partition_keys(SimpleNamespace(partitions=lambda: tuple(names))) == names
