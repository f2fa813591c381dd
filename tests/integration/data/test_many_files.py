"""Very many files, prepared in bounded memory.

    PREPARE_FILES=1000000 infra/test -m slow tests/integration/data/test_many_files.py -s

The set is generated: few files on the disk, each under very many names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT

NUM_FILES = int(os.environ.get("PREPARE_FILES", "200000"))
NUM_CLASSES = 20
NUM_DISTINCT = 2_000
"""ext4 allows 65,000 names for each."""


def fill(root):
    rng = np.random.default_rng(0)
    pool = root / ".pool"  # hidden, so no samples
    pool.mkdir(parents=True)
    for number in range(NUM_DISTINCT):
        grid = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(grid).resize((32, 32)).save(pool / f"{number}.jpg", quality=90)
    for label in range(NUM_CLASSES):
        folder = root / f"class{label:02d}"
        folder.mkdir()
        for number in range(label, NUM_FILES, NUM_CLASSES):
            os.link(pool / f"{number % NUM_DISTINCT}.jpg", folder / f"image{number:07d}.jpg")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_very_many_files_need_little_memory(tmp_path):
    fill(tmp_path / "images")
    command = [sys.executable, "-m", "tests.support.prepare_alone", tmp_path / "images", tmp_path / "home"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    print(f"\n{json.dumps(found)}")  # noqa: T201
    assert found["num_samples"] == found["num_prepared"] == NUM_FILES
    assert found["reused"]
    # A sample's name of 26 bytes, its stamp of 19 and 60 of numbers; twice that while it is sorted into splits.
    assert found["flow_bytes_of_listing"] < 250 * NUM_FILES + 20 * 2**20
    # Of each shard a record; else what is at the scheduler.
    assert found["flow_bytes_of_preparing"] < 8 * 2**10 * (NUM_FILES / 1_000) + 60 * 2**20
    assert found["worker_bytes"] < found["worker_bytes_early"] + 50 * 2**20
    assert not any(Path(tmp_path / "home" / "prepared").glob(".tmp-*"))
