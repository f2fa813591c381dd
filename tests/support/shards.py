"""What tests of sources share."""

from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shards


def shards_of(listing, data, directory, sharing=0):
    """Records of all shards of a listing, written below a directory."""
    for split in ("train", "validation", "test"):
        (directory / split).mkdir(parents=True)
    return write_shards(list(ChunkPlanner(listing, data, directory).chunks()), sharing)
