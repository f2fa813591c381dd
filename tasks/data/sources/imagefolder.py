"""Images with a table of their labels, as on the Hugging Face Hub: `metadata.csv` with `file_name` and `label`.

A table is about the images of its own folder and below. It lies in the root, or in each of `train/`, `test/` ...
"""

import codecs
import csv
from collections import Counter
from collections.abc import Iterator
from posixpath import normpath

import numpy as np

from paceline.conf.data import Data
from paceline.tasks.data.listing import SPLITS, Origin, SampleListing, order_classes
from paceline.tasks.data.sources import folder
from paceline.tasks.errors import InputError

METADATA, CSV = "metadata.csv", ".csv"
FILE_NAME, LABEL = "file_name", "label"


def list_samples(data: Data) -> SampleListing:
    """List the images that tables name; InputError if a table and its images do not match."""
    root = str(data.root)
    tree = folder.read_tree(root, folder.IMAGE_SUFFIXES | {CSV}, data.trust_directory_times)
    tables = [path for path in tree.files.paths if path.rpartition("/")[2] == METADATA]
    if not tables:
        fix = f"add one with the columns {FILE_NAME} and {LABEL}, or use data.source=folder for class-named folders"
        raise InputError(f"data.root={root}: holds no {METADATA}; {fix}")
    words: dict[str, str] = {}
    for table in tables:
        for path, word in _rows(root, table):
            if path in words:
                raise InputError(f"data.root={root}: {table} lists {path} twice; remove one of its rows")
            words[path] = word
    class_names = order_classes(set(words.values()))
    numbers = {word: number for number, word in enumerate(class_names)}
    is_image = np.array([folder.suffix_of(path) != CSV for path in tree.files.paths])
    images = tree.files.take(np.flatnonzero(is_image))
    labels = np.array([numbers.get(words.pop(path, ""), -1) for path in images.paths], dtype=np.int32)
    if words:
        fault = f"{len(words)} files of {METADATA} do not exist, such as {next(iter(words))}"
        fix = f"correct {FILE_NAME}, which is relative to the folder of the table, or remove the rows"
        raise InputError(f"data.root={root}: {fault}; {fix}")
    if (labels < 0).any():
        unlabelled = images.paths[int(np.argmax(labels < 0))]
        fault = f"{int((labels < 0).sum())} images are in no {METADATA}, such as {unlabelled}"
        raise InputError(f"data.root={root}: {fault}; add their rows or remove them")
    images = images.with_labels(labels)
    has_train = "train" in tree.folders
    tops = [path.partition("/")[0] for path in images.paths]
    if has_train and (misplaced := sorted(set(tops) - set(folder.SPLIT_FOLDERS))):
        raise InputError(f"data.root={root}: {misplaced[0]} lies next to train/; move its images into train/ or test/")
    split_of = np.array([SPLITS.index(folder.SPLIT_FOLDERS[top]) if has_train else 0 for top in tops])
    chosen = {split: np.flatnonzero(split_of == number) for number, split in enumerate(SPLITS)}
    splits = {split: images.take(at) for split, at in chosen.items() if len(at)}
    ignored = tree.ignored + Counter({CSV: int((~is_image).sum()) - len(tables)})
    return SampleListing.of(data, Origin("files", folder.absolute(root)), class_names, splits, ignored, channels=3)


def _rows(root: str, table: str) -> Iterator[tuple[str, str]]:
    """Path below the root and label of each row."""
    filesystem, base = folder.open_root(root)
    where, directory = f"data.root={root}: {table}", table.rpartition("/")[0]
    with filesystem.open(folder.below(base, table), "rb") as stream:
        rows = csv.DictReader(codecs.getreader("utf-8-sig")(stream))
        try:
            columns = rows.fieldnames or ()
            if not {FILE_NAME, LABEL} <= set(columns):
                held = ", ".join(columns) or "(none)"
                raise InputError(f"{where} has the columns {held}; it needs {FILE_NAME} and {LABEL}")
            for row in rows:
                name, label = (row[FILE_NAME] or "").strip(), (row[LABEL] or "").strip()
                if not name or not label:
                    raise InputError(f"{where}: line {rows.line_num} lacks {FILE_NAME if not name else LABEL}; fill it")
                yield normpath(f"{directory}/{name}" if directory else name), label
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"{where}: line {rows.line_num} is not CSV in UTF-8 ({error}); write it again") from error
