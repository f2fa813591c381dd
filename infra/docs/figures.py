"""The figures of the first run in README and tutorial, from the evidence of that run: `infra/docs/generate`."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from paceline.tasks.speedup.evidence.archive import check, unpack
from paceline.tasks.speedup.evidence.recompute import FACTS, SUMMARY

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "infra" / "evidence" / "digits.tar"
PLACES = (ROOT / "README.md", ROOT / "infra" / "docs" / "tutorials" / "first-run.md")
WIDTH = 120
BLOCK = re.compile(r"(?<=```text\n)(?:(?!```).)*?^throughput .*?(?=```)", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """The pages with the figures of the evidence; none where it is missing."""
    if not EVIDENCE.exists():
        return {}
    rows = printed_rows()
    return {path: with_figures(path.read_text(encoding="utf-8"), rows) for path in PLACES}


def printed_rows() -> dict[str, str]:
    """The rows that the run has printed, without its duration, which the command takes at the very end.

    Raises:
        InputError: The evidence has changed or is of a disturbed run.
    """
    content = EVIDENCE.read_bytes()
    check(content, str(EVIDENCE))
    files = unpack(content, str(EVIDENCE))
    run_id = json.loads(files[FACTS])["run_id"]
    where = f"{run_id} in experiment paceline; see it with: paceline ui {run_id}"
    return {"run": where, **{name: row for name, row in json.loads(files[SUMMARY])["rows"] if name != "time"}}


def with_figures(text: str, rows: dict[str, str]) -> str:
    """The text with these rows in its block, as far as the block has them."""
    block = BLOCK.search(text)
    assert block is not None
    lines = []
    for line in block[0].splitlines():
        name = line.partition(" ")[0]
        if name not in rows:
            lines += [line] if name else []
            continue
        lead, indent = f"{name:<12}", 12 * " "
        lines += textwrap.wrap(rows[name], WIDTH, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)
    return text[: block.start()] + "\n".join(lines) + "\n" + text[block.end() :]
