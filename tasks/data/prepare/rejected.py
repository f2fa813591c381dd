"""A spool on disk for rejected samples; shards arrive in any order and are listed by their number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from paceline.tasks.data.listing import SPLITS
from paceline.tasks.data.prepare.shard import Rejected, ShardRecord


class _Piece(NamedTuple):
    split: int
    number: int
    """Number of the shard."""
    start: int
    num_bytes: int


class RejectedSpool:
    """Takes what shards reject and gives it back in the order of the shards, as lines of JSON."""

    def __init__(self, directory: Path) -> None:
        self._stream = TemporaryFile(dir=directory)  # noqa: SIM115 - closed in close
        self._pieces: list[_Piece] = []
        self.num_rejected = 0

    def close(self) -> None:
        """Remove the file."""
        self._stream.close()

    def add(self, record: ShardRecord) -> None:
        """Store the rejected samples of a shard."""
        if not record.rejected:
            return
        lines = "".join(f"{entry.model_dump_json()}\n" for entry in record.rejected).encode()
        start = self._stream.seek(0, os.SEEK_END)
        self._stream.write(lines)
        self._pieces.append(_Piece(SPLITS.index(record.split), record.number, start, len(lines)))
        self.num_rejected += len(record.rejected)

    def pieces(self) -> Iterator[bytes]:
        """All lines, those of one shard at a time."""
        for piece in sorted(self._pieces):
            self._stream.seek(piece.start)
            yield self._stream.read(piece.num_bytes)

    def restore(self, record: ShardRecord) -> ShardRecord:
        """A record with what its shard rejects."""
        lines: list[bytes] = []
        for piece in self._pieces:
            if (SPLITS[piece.split], piece.number) == (record.split, record.number):
                self._stream.seek(piece.start)
                lines = self._stream.read(piece.num_bytes).splitlines()
        return record.model_copy(update={"rejected": tuple(map(Rejected.model_validate_json, lines))})

    def first(self) -> Rejected:
        """The first rejected sample of the first shard that has one."""
        return Rejected.model_validate_json(next(self.pieces()).split(b"\n", 1)[0])
