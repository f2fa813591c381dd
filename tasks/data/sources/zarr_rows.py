"""Rows of a Zarr group of images (format 2 or 3, sharded or not): the chunks that hold them are decoded, one at a time.

The group has the arrays `images` and `labels`, and `class_names` as an attribute, or as one of the group around it.
Whoever writes the data also chooses its codecs, so only those are accepted that run no code from the data and whose
results are bounded: see `BoundedPipeline`.
"""

import asyncio
import bz2
import gzip
import io
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.codecs import ShardingCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import register_pipeline
from zarr.storage import FsspecStore

from paceline.tasks.data.decode.transform import DecodeError
from paceline.tasks.data.sources import arrays, folder
from paceline.tasks.data.sources.arrays import CLASS_NAMES, IMAGES, LABELS, ZARR, Row, Table
from paceline.tasks.data.storage import s3
from paceline.tasks.errors import InputError, one_line

MAX_CHUNK_BYTES = 2**28  # limit of a chunk, which is decoded completely, and of the rows that are read at a time
SLACK_BYTES = 2**16  # of checksums, and of the index of a shard
CODECS = (
    *("blosc", "bytes", "bz2", "crc32c", "gzip", "lz4"),
    *("sharding_indexed", "transpose", "vlen-utf8", "zlib", "zstd"),
)
_ZSTD = b"\x28\xb5\x2f\xfd"


def _zstd_size(content: bytes, limit: int) -> int:
    """Size in the header of the first frame (RFC 8878, 3.1.1.1); of frames without one, that of their content."""
    flags = content[4] if content.startswith(_ZSTD) else 0
    is_single = flags >> 5 & 1
    width = (is_single, 2, 4, 8)[flags >> 6]
    if not width:
        return len(pa.CompressedInputStream(pa.BufferReader(content), "zstd").read(limit + 1))
    start = 6 - is_single + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(content[start : start + width], "little")


SIZES: dict[str, Callable[[bytes, int], int]] = {
    "blosc": lambda content, _: int.from_bytes(content[4:8], "little"),
    "lz4": lambda content, _: int.from_bytes(content[:4], "little"),
    "zstd": _zstd_size,
    "zlib": lambda content, limit: len(zlib.decompressobj().decompress(content, limit + 1)),
    "gzip": lambda content, limit: len(gzip.GzipFile(fileobj=io.BytesIO(content)).read(limit + 1)),
    "bz2": lambda content, limit: len(bz2.BZ2File(io.BytesIO(content)).read(limit + 1)),
}
"""Bytes of a chunk when decompressed: from a header that the compressor obeys, else counted up to a limit."""


class BoundedPipeline(BatchedCodecPipeline):
    """Zarr's own pipeline, except that it never decompresses a chunk to more than twice the size that its shape has."""

    async def decode_batch(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Decode chunks. Raises ValueError: a chunk is too large."""
        pairs = list(chunk_bytes_and_specs)
        contents, specs = [content for content, _ in pairs], [spec for _, spec in pairs]
        for codec in reversed(self.bytes_bytes_codecs):
            await asyncio.to_thread(_check_sizes, str(codec.to_dict()["name"]), contents, specs)
            contents = list(await codec.decode(zip(contents, specs, strict=True)))
        last = self.array_bytes_codec
        if isinstance(last, V2Codec) and last.compressor is not None:
            await asyncio.to_thread(_check_sizes, last.compressor.codec_id, contents, specs)
        rest = replace(self, bytes_bytes_codecs=())
        return await BatchedCodecPipeline.decode_batch(rest, zip(contents, specs, strict=True))


register_pipeline(BoundedPipeline)
# For the process, as each shard looks its pipeline up by itself. It reads the same of all data that are sound.
zarr.config.set({"codec_pipeline.path": f"{__name__}.{BoundedPipeline.__name__}"})


def _check_sizes(codec: str, contents: Sequence[Buffer | None], specs: Sequence[ArraySpec]) -> None:
    for content, spec in zip(contents, specs, strict=True):
        item_bytes = getattr(spec.dtype, "item_size", None)
        if content is None or codec not in SIZES:
            continue
        declared = arrays.MAX_LABEL_BYTES if item_bytes is None else int(np.prod(spec.shape)) * item_bytes
        limit = 2 * declared + SLACK_BYTES
        with suppress(OSError, EOFError, zlib.error):  # damaged: the codec says how
            if SIZES[codec](content.to_bytes(), limit) > limit:
                raise ValueError(f"a chunk has more than {limit} bytes in {codec}, and its shape has {declared}")


def groups(root: str, path: str) -> list[str]:
    """Paths of the groups below a store that hold images: the store itself (empty), or those named after splits."""
    group = _group(root, path)
    if IMAGES in group:
        return [""]
    split_names = [name for name, inner in sorted(group.groups()) if name in folder.SPLIT_FOLDERS and IMAGES in inner]
    if not split_names:
        names = ", ".join(sorted(group.keys())) or "nothing"
        raise InputError(f"holds {names}; it needs the arrays {IMAGES} and {LABELS}, or groups train, test with them")
    return split_names


def table(root: str, path: str) -> Table:
    """The table without its pixels."""
    group = _group(root, path)
    images = _array(group, IMAGES)
    with warnings.catch_warnings():  # not where rows are read: it holds for all threads of a process
        warnings.simplefilter("ignore")  # of fixed-length words, which other libraries than this one may not read
        labels = _array(group, LABELS)
    channels = arrays.channels_of(images.shape, images.dtype)
    chunk_bytes = int(np.prod(images.chunks)) * images.dtype.itemsize
    if chunk_bytes > MAX_CHUNK_BYTES:
        fault = f"{IMAGES} has chunks {images.chunks} of {chunk_bytes} bytes, each decoded as a whole"
        raise InputError(f"{fault}; up to {MAX_CHUNK_BYTES} are understood; write it with fewer images a chunk")
    if labels.shape != images.shape[:1]:
        raise InputError(f"has {images.shape[0]} images and labels {labels.shape}; give one label for each image")
    if labels.nbytes > arrays.MAX_LABEL_BYTES:
        raise InputError(f"{LABELS} has {labels.nbytes} bytes; up to {arrays.MAX_LABEL_BYTES} are understood")
    if int(np.prod(labels.chunks)) * labels.dtype.itemsize > arrays.MAX_LABEL_BYTES:
        raise InputError(f"{LABELS} has chunks {labels.chunks}; write it with chunks of its own size")
    outer = path.rpartition("/")[0]
    names: Any = group.attrs.get(CLASS_NAMES) or ()
    if not names and outer.lower().endswith(ZARR):  # of the store that the group lies in
        names = _group(root, outer).attrs.get(CLASS_NAMES, ())
    if not isinstance(names, (list, tuple)):
        raise InputError(f"{CLASS_NAMES} is {names!r}; give a list of words")
    values = np.asarray(labels[:])
    if values.dtype.kind == "T":  # words of any length
        values = np.array(values.tolist(), dtype=np.str_)
    return Table(values, channels, tuple(map(str, names)))


def rows(root: str, path: str, chosen: Sequence[int]) -> Iterator[Row | DecodeError]:
    """Images of rows, in their order."""
    images = _array(_group(root, path), IMAGES)
    channels = arrays.channels_of(images.shape, images.dtype)
    per_chunk = images.chunks[0]
    # Whatever part of an image a chunk holds, all of the image is read.
    row_bytes = int(np.prod(images.shape[1:])) * images.dtype.itemsize
    at_once = max(1, MAX_CHUNK_BYTES // row_bytes)
    for _, members in groupby(chosen, key=lambda row: (row // per_chunk, row % per_chunk // at_once)):
        inside = list(members)
        first = inside[0]
        try:
            block = np.asarray(images[first : inside[-1] + 1])
        except OSError:
            raise
        except Exception as error:  # each codec raises its own
            if s3.is_of_store(error):
                raise OSError(one_line(error)) from error
            raise InputError(f"{IMAGES} from {first} on: {one_line(error)}") from error
        if len(block) != inside[-1] + 1 - first:
            raise InputError(f"{IMAGES} ends before its image {inside[-1]}")
        for row in inside:
            image = block[row - first]
            if (image == images.fill_value).all():  # as which Zarr reads missing chunks
                yield DecodeError(f"every pixel is the fill value {images.fill_value}, as where nothing was written")
            else:
                yield arrays.in_eight_bits(image.reshape(*image.shape[:2], channels))


def _group(root: str, place: str) -> zarr.Group:
    filesystem, path = folder.open_root(f"{root.rstrip('/')}/{place}")
    store: str | FsspecStore = path
    if not folder.is_local(filesystem):  # the one that is open already, with its settings and connections
        store = FsspecStore(AsyncFileSystemWrapper(filesystem, asynchronous=True), read_only=True, path=path)
    try:
        return zarr.open_group(store, mode="r", use_consolidated=False)
    except FileNotFoundError as error:
        raise InputError("is not a Zarr group; write one, of format 2 or 3") from error


def _array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    array = group.get(name)
    if not isinstance(array, zarr.Array):
        held = ", ".join(sorted(group.keys())) or "nothing"
        raise InputError(f"holds {held}; it needs the arrays {IMAGES} and {LABELS}")
    metadata = array.metadata
    if metadata.zarr_format == 2:  # noqa: PLR2004
        codecs = [codec.codec_id for codec in (*(metadata.filters or ()), *filter(None, [metadata.compressor]))]
    else:
        codecs = [str(codec.to_dict()["name"]) for codec in _flatten(metadata.codecs)]
    if refused := [codec for codec in codecs if codec not in CODECS]:
        fault = f"{name} is stored with the codec {refused[0]}, whose result is not bounded"
        raise InputError(f"{fault}; write it with some of {', '.join(CODECS)}")
    return array


def _flatten(codecs: Iterable[Any]) -> Iterator[Any]:
    """Codecs, and those within shards."""
    for codec in codecs:
        yield codec
        if isinstance(codec, ShardingCodec):
            yield from _flatten((*codec.codecs, *codec.index_codecs))
