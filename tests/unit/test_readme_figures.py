"""The figures of the first run in README and tutorial are evidence, which anyone can recompute."""

import re

import pytest

from infra.docs import figures
from paceline.tasks.speedup.evidence.archive import pack
from paceline.tasks.speedup.limit_share import format_share
from paceline.tasks.speedup.verdict import format_ratio
from tests.support.evidence import SimulatedProbe, evidence_of

TEXT = """Before it.

```text
quality     accuracy 1%
speedup     2.5 times as fast as a word that
            takes two lines
throughput  training 6 samples/s
view        stays
```

```text
speedup     of a busy machine
```
"""


def test_rows_are_filled_into_their_block_and_wrapped():
    rows = {"quality": "accuracy 2%", "speedup": "word " * 30, "throughput": "fast", "limit": "not shown here"}
    assert figures.with_figures(TEXT, rows) == TEXT.replace("accuracy 1%", "accuracy 2%").replace(
        "2.5 times as fast as a word that\n            takes two lines",
        "word word word word word word word word word word word word word word word word word word word word word\n"
        "            word word word word word word word word word",
    ).replace("training 6 samples/s", "fast")


def test_pages_get_what_the_run_of_the_evidence_printed(tmp_path, monkeypatch):
    probe = SimulatedProbe({"baseline": 0.1, "candidate": 0.06}).measure()
    summary, files = evidence_of(*probe)
    (tmp_path / "digits.tar").write_bytes(pack(files))
    monkeypatch.setattr(figures, "EVIDENCE", tmp_path / "digits.tar")
    pages = figures.pages()
    assert list(pages) == list(figures.PLACES)
    for path, text in pages.items():
        block = " ".join(figures.BLOCK.search(text)[0].split())
        assert f" speedup {summary['speedup']['verdict']} " in block
        assert f" run {32 * 'a'} in experiment paceline; see it with: paceline ui {32 * 'a'}" in block
        assert text.count("\n") - path.read_text().count("\n") in range(-10, 11)
    (tmp_path / "digits.tar").write_bytes(pack(evidence_of(*probe, contaminated=True)[1]))
    with pytest.raises(ValueError, match="disturbed"):
        figures.pages()
    monkeypatch.setattr(figures, "EVIDENCE", tmp_path / "missing.tar")
    assert figures.pages() == {}


@pytest.fixture(scope="module")
def evidence():
    if not figures.EVIDENCE.exists():
        pytest.skip("infra/evidence/digits.tar is missing: paceline run digits on a quiet machine writes it")
    return figures.read_evidence()[0]


@pytest.mark.parametrize("path", figures.PLACES, ids=lambda path: path.name)
def test_the_figures_of_the_first_run_follow_from_its_steps(evidence, path):
    block = " ".join(figures.BLOCK.search(path.read_text())[0].split())
    ratio, low, high = (evidence[f"speedup.{name}"] for name in ("ratio", "low", "high"))
    assert f"speedup {format_ratio(ratio)} times as fast" in block
    assert f"(95 % interval {format_ratio(low, ratio)} to {format_ratio(high, ratio)} " in block
    assert f"{evidence['speedup.num_blocks']} paired rounds" in block
    assert f"limit {format_share(evidence['speedup.of_limit'])} of what this device does" in block
    assert f"throughput training {evidence['train.samples_per_second']:,.0f} samples/s" in block


def test_the_evidence_is_small_and_names_no_place(evidence):
    content = figures.EVIDENCE.read_bytes()
    assert len(content) < 150_000
    assert not re.search(rb"/(home|root|tmp|work)/", content)
