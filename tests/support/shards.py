"""What tests of sources share."""

from paceline.tasks.data.prepare.chunks import ChunkPlanner
from paceline.tasks.data.prepare.shard import write_shard


def shards_of(listing, data, directory):
    """Records of all shards of a listing, written below a directory."""
    for split in ("train", "validation", "test"):
        (directory / split).mkdir(parents=True)
    return [write_shard(chunk) for chunk in ChunkPlanner(listing, data, directory).chunks()]
