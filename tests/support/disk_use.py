"""What a directory uses on its disk."""

from collections import Counter
from pathlib import Path


def disk_use(directory: Path) -> Counter[str]:
    """Bytes on the disk of the files below each entry of a directory, as `du` counts them."""
    sizes = Counter[str]()
    for path in directory.rglob("*"):
        if path.is_file():
            sizes[path.relative_to(directory).parts[0]] += path.stat().st_blocks * 512
    return sizes
