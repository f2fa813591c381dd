"""Images with a table of labels: what it lists, and what is refused before any work."""

import pytest
from PIL import Image

from paceline.conf.data import Data
from paceline.tasks.data.decode.pixels import read_pixels
from paceline.tasks.data.sources import registry as source
from tests.support.refusals import refused


def save(root, *paths):
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (number, 0, 0)).save(root / path)


def data_of(root, **changes):
    return Data(source="imagefolder", root=str(root), image_size=12, **changes)


def test_a_table_in_the_root_names_files_below_it(tmp_path):
    save(tmp_path, *(f"pictures/{number:02d}.png" for number in range(12)))
    (tmp_path / "notes.csv").write_text("a,b\n")
    rows = "\n".join(f'pictures/{number:02d}.png,{number % 3 + 9},"a, b"' for number in range(12))
    (tmp_path / "metadata.csv").write_text(f"\ufefffile_name,label,caption\n{rows}\n")
    listing = source.list_samples(data_of(tmp_path, test_fraction=0.25, validation_fraction=0))
    assert listing.class_names == ("9", "10", "11")
    assert (len(listing.train), len(listing.test)) == (9, 3)
    assert listing.ignored == {".csv": 1}
    for sample, image in zip(listing.train, read_pixels(listing.origin, listing.train, 12, 3).images_NHWC, strict=True):
        number = int(sample.path[-6:-4])
        assert (image[0, 0, 0], sample.label) == (number, number % 3)


def test_each_split_has_a_table_of_its_own_or_the_root_names_both(tmp_path):
    save(tmp_path, *(f"{split}/{number}.png" for split in ("train", "test") for number in range(4)))
    rows = [f"{number}.png,{('cat', 'dog')[number % 2]}" for number in range(4)]
    for split in ("train", "test"):
        (tmp_path / split / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
    apart = source.list_samples(data_of(tmp_path, validation_fraction=0))
    assert (apart.class_names, len(apart.train), len(apart.test)) == (("cat", "dog"), 4, 4)
    for split in ("train", "test"):
        (tmp_path / split / "metadata.csv").unlink()
    both = [f"{split}/{row}" for split in ("train", "test") for row in rows]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label", *both]))
    assert source.list_samples(data_of(tmp_path, validation_fraction=0)).sha256 == apart.sha256


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (None, ("metadata.csv",)),
        ("", ("file_name", "label")),
        ("file_name,class\n0.png,a\n1.png,b\n", ("file_name", "class")),
        ("file_name,label\n0.png,a\n", ("1.png",)),
        ("file_name,label\n0.png,a\n1.png,b\n2.png,b\n", ("2.png",)),
        ("file_name,label\n0.png,a\n1.png,b\n./0.png,b\n", ("0.png",)),
        ("file_name,label\n0.png,a\n1.png,\n", ("3", "label")),
        ("file_name,label\n0.png,a\n,b\n", ("3", "file_name")),
        ("file_name,label\n0.png,a\n1.png,a\n", ("1",)),
        ("file_name,label\n../0.png,a\n1.png,b\n", ("../0.png",)),
        ("file_name,label\n/etc/0.png,a\n1.png,b\n", ("/etc/0.png",)),
        (b"file_name,label\n0.png,\xff\n", ("metadata.csv",)),
    ],
)
def test_what_is_wrong_is_one_error_before_any_work(tmp_path, table, told):
    save(tmp_path, "0.png", "1.png")
    if table is not None:
        (tmp_path / "metadata.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    with refused("data.root", tmp_path, *told):
        source.list_samples(data_of(tmp_path))


def test_a_folder_next_to_the_splits_is_refused(tmp_path):
    save(tmp_path, "train/0.png", "more/1.png")
    (tmp_path / "metadata.csv").write_text("file_name,label\ntrain/0.png,a\nmore/1.png,b\n")
    with refused("data.root", "more"):
        source.list_samples(data_of(tmp_path))
