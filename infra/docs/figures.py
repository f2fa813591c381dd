"""The figures of the first run in README and tutorial, from the evidence of that run: `infra/docs/generate`."""

import json
import re
import runpy
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from paceline.tasks.speedup.evidence.archive import unpack
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
    _, rows = read_evidence()
    return {path: with_figures(path.read_text(encoding="utf-8"), rows) for path in PLACES}


def read_evidence() -> tuple[dict[str, Any], dict[str, str]]:
    """The figures, recomputed, and the rows that the run has printed, without its duration, which comes last.

    The program in the archive recomputes them: its version stays that of the evidence. Raises ValueError: the evidence
    has changed, is of a disturbed run, or its steps give other figures.
    """
    files = unpack(EVIDENCE.read_bytes(), str(EVIDENCE))
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "recompute.py"
        program.write_bytes(files[program.name])
        figures, differ = runpy.run_path(str(program))["check"](files)
    if differ:
        raise ValueError(f"{EVIDENCE}: its steps give other figures: {', '.join(differ)}")
    run_id = json.loads(files[FACTS])["run_id"]
    where = f"{run_id} in experiment paceline; see it with: paceline ui {run_id}"
    rows = {name: row for name, row in json.loads(files[SUMMARY])["rows"] if name != "time"}
    return figures, {"run": where, **rows}


def with_figures(text: str, rows: dict[str, str]) -> str:
    """The text with these rows in its block, as far as the block has them."""
    block = BLOCK.search(text)
    assert block is not None
    lines = []
    for line in block[0].splitlines():
        name = line[:12].strip()
        if name not in rows:
            lines += [line] if name else []
            continue
        lead, indent = f"{name:<12}", 12 * " "
        lines += textwrap.wrap(rows[name], WIDTH, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)
    return text[: block.start()] + "\n".join(lines) + "\n" + text[block.end() :]
