"""Results of a long benchmark, one JSON object per line. The same command continues from them after an interruption."""

import json
from pathlib import Path


def read_lines(file: Path):
    """The results so far; none where the file does not exist yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_line(file: Path, line):
    """Store one more result."""
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
