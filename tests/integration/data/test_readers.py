"""Archives, tables of labels and compressed sounds, trained on by `paceline run` as a user does it."""

import csv

import pytest
from PIL import Image

from tests.support.archives import COLOURS, make_shards
from tests.support.signals import encode, sine

SMALL = ["data.image_size=16", "model.width=4", "model.depth=1", "recipe.num_epochs=2", "recipe.batch_size=4"]
PLAIN = ["speedup.baseline=none", "track.experiment=readers", "recipe.augment=none", "recipe.warmup_epochs=0"]


def make_table(root):
    with (root / "metadata.csv").open("w") as stream:
        rows = csv.writer(stream)
        rows.writerow(["file_name", "label"])
        for number in range(24):
            name = sorted(COLOURS)[number % 2]
            Image.new("RGB", (16, 16), COLOURS[name]).save(root / f"{number}.png")
            rows.writerow([f"{number}.png", name])


def make_tones(root):
    for name, frequency in (("low", 400), ("high", 3_000)):
        (root / name).mkdir()
        for number in range(12):
            form = ("flac", "mp3", "ogg")[number % 3]
            (root / name / f"{number}.{form}").write_bytes(encode(sine(frequency + 10 * number), form))


KINDS = {
    "webdataset": ("folder", make_shards, ["data.source=webdataset"]),
    "imagefolder": ("folder", make_table, ["data.source=imagefolder"]),
    "signals": ("signals", make_tones, ["data.signal.kind=stft"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_learns_from_it(call, tmp_path, kind):
    preset, make, more = KINDS[kind]
    make(tmp_path)
    summary = call("run", preset, f"data.root={tmp_path}", *more, *SMALL, *PLAIN)
    assert summary["dataset"]["num_rejected"] == 0
    assert summary["dataset"]["num_train"] + summary["dataset"]["num_validation"] + summary["dataset"]["num_test"] >= 24
    assert summary["evaluate"]["accuracy"] is not None
