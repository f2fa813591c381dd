"""Real video files and folders of frames, made for a test: a bright square that goes right or left over grey."""

import io

import av
import numpy as np
from PIL import Image

SUFFIXES = {"mp4": "libx264", "avi": "mpeg4", "webm": "libvpx-vp9", "mkv": "ffv1"}
PIXELS = {"ffv1": "bgr0"}


def frames_of(direction, num_frames, size=(36, 48), seed=0):
    """Frames (T, H, W, 3)."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(60, 80, (num_frames, *size, 3), dtype=np.uint8)
    top = rng.integers(8, size[0] - 16)
    for number in range(num_frames):
        left = round(10 + (size[1] - 28) * number / max(1, num_frames - 1))
        left = left if direction == "right" else size[1] - 8 - left
        frames[number, top : top + 8, left : left + 8] = (240, 220, 60)
    return frames


def grey_levels(num_frames, size=(36, 48)):
    """Frames each of which is grey in a level of its own: 4 times its number."""
    return np.stack([np.full((*size, 3), 4 * number, np.uint8) for number in range(num_frames)])


def video(frames_THWC, suffix="mkv", codec=None):
    """A file; lossless as .mkv."""
    codec = codec or SUFFIXES[suffix]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format={"mkv": "matroska"}.get(suffix, suffix)) as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames_THWC.shape[1:3]
        stream.pix_fmt = PIXELS.get(codec, "yuv420p")
        for frame in frames_THWC:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def write_frames(directory, frames_THWC, name="{}.png"):
    directory.mkdir(parents=True)
    for number, frame in enumerate(frames_THWC):
        Image.fromarray(frame).save(directory / name.format(number))


def make_clips(root, per_class=12, seed=5):
    """Folders `left` and `right` with every kind of file in turn, and folders of frames; the names of the damaged."""
    damaged, kinds = set(), [*SUFFIXES, ""]
    for label, direction in enumerate(("left", "right")):
        (root / direction).mkdir(parents=True)
        for number in range(per_class):
            frames = frames_of(direction, 10 + number % 7, seed=seed + 1000 * label + number)
            suffix = kinds[number % len(kinds)]
            name = f"{direction}/{number:03d}{suffix and '.'}{suffix}"
            if not suffix:
                write_frames(root / name, frames)
                continue
            content = video(frames, suffix)
            if number in (1, 2):
                content = content[: len(content) // 2]
                damaged.add(name)
            (root / name).write_bytes(content)
    return damaged
