"""Files that are small on disk and large when decoded, in a process that may have 128 MiB more than it starts with."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

from tests.support import clips
from tests.support.signals import encode, sine, wav

CHILD = """
import json, resource, sys
import numpy as np
from pathlib import Path
from paceline.conf.data import Data
from paceline.tasks.data.decode import pixels, spectrogram, waveform
from paceline.tasks.data.sources import parquet_rows, zarr_rows
from paceline.tasks.data.sources import registry as source
from paceline.tasks.errors import InputError
from tests.support.shards import shards_of
import av

np.ones((256, 256)) @ np.ones((256, 256))  # OpenBLAS ends the process if it finds no memory for its buffers
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 128 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
data = Data.model_validate(json.loads(sys.argv[1]))
try:
    records = shards_of(source.list_samples(data), data, Path(data.root) / "out")
    rejected = {entry.path: entry.reason for record in records for entry in record.rejected}
    result = {"rejected": rejected, "num": sum(record.num_samples for record in records)}
except InputError as error:
    result = {"error": str(error)}
except Exception as error:
    result = {"failed": repr(error)}
print(json.dumps(result))
"""
NUM = 12  # sound samples

pytestmark = pytest.mark.slow


def fill(root, suffix, content):
    for number in range(NUM):
        place = root / ("a", "b")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}{suffix}").write_bytes(content)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def large_png():
    """150 million pixels of one bit, in 20 kB."""
    width, height = 15_000, 10_000
    rows = zlib.compress(bytes((1 + width // 8) * height))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    parts = (struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def large_wav(path):
    """600 MB of silence, in a file that takes a page of the disk."""
    content = bytearray(wav(np.zeros(100)))
    content[4:8], content[40:44] = struct.pack("<I", 600_000_036), struct.pack("<I", 600_000_000)
    path.write_bytes(content)
    os.truncate(path, 600_000_044)


KINDS = {
    "image": ("folder", ".png", lambda: png(np.zeros((20, 20, 3), np.uint8)), large_png, {}),
    "clip": (
        *("clips", ".avi", lambda: clips.video(np.zeros((2, 32, 32, 3), np.uint8), "avi")),
        *(lambda: clips.video(np.broadcast_to(np.uint8(0), (2, 6_000, 6_000, 3)), "avi"), {"num_frames": 2}),
    ),
    "sound": (
        *("signals", ".flac", lambda: encode(sine(400, seconds=0.2), "flac")),
        *(lambda: encode(np.zeros(2**24), "flac"), {"signal": {"kind": "stft"}}),
    ),
    "wav": ("signals", ".wav", lambda: wav(sine(400, seconds=0.2)), large_wav, {"signal": {"kind": "stft"}}),
}


def npz(root):
    np.savez_compressed(root / "bomb.npz", images=np.zeros((2, 8_000, 8_000), np.uint16), labels=[0, 1])


def parquet(root):
    table = pa.table({"image": [bytes(2**28), *([b"x"] * 3)], "label": [0, 1, 0, 1]})
    pq.write_table(table, root / "bomb.parquet", compression="zstd")


def zarr_store(root):
    """A chunk of 256 bytes that has 798 MiB, as in the reading for attacks."""
    group = zarr.open_group(root / "bomb.zarr", mode="a", zarr_format=2)
    import numcodecs

    group.create_array("images", shape=(4, 8, 8), chunks=(4, 8, 8), dtype="u1", compressors=numcodecs.Zlib())[:] = 1
    group.create_array("labels", data=np.arange(4) % 2)
    pump = zlib.compressobj(1)
    pieces = [pump.compress(bytes(2**20)) for _ in range(798)]
    (root / "bomb.zarr" / "images" / "0.0.0").write_bytes(b"".join([*pieces, pump.flush()]))


TABLES = {"npz": npz, "parquet": parquet, "zarr": zarr_store}


def read(root, settings):
    """What comes of a data set in a process with a memory limit."""
    settings |= {"root": str(root), "image_size": 16}
    # OpenBLAS and glibc reserve addresses for each thread, which count although they are never used.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_named_and_nothing_else_is_lost(tmp_path, kind):
    source, suffix, sound, bomb, settings = KINDS[kind]
    fill(tmp_path, suffix, sound())
    path = tmp_path / "a" / f"bomb{suffix}"
    if kind == "wav":
        bomb(path)
    else:
        path.write_bytes(bomb())
    result = read(tmp_path, {"source": source, **settings})
    assert result.get("num") == NUM, result
    assert list(result["rejected"]) == [f"a/bomb{suffix}"]
    assert "memory" in result["rejected"][f"a/bomb{suffix}"].lower()


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_does_not_fit_is_named(tmp_path, kind):
    TABLES[kind](tmp_path)
    result = read(tmp_path, {"source": "arrays", "test_fraction": 0, "validation_fraction": 0})
    assert f"{tmp_path}: bomb.{kind}" in result.get("error", ""), result
