"""The documents are short, in plain English, up to date, and a website that needs no network."""

import ast
import re
import shutil
import statistics
import subprocess

import pytest

from infra.docs import links, reference
from infra.docs.links import FENCE, ROOT
from paceline.conf.environment import QUIET_ENVIRONMENT
from paceline.tasks.doctor.finding import Finding
from paceline.tasks.records.training import EvaluateResult
from paceline.tasks.speedup.compare import ComparedRow
from paceline.tasks.speedup.forecast.records import Prediction
from paceline.tasks.speedup.records import SpeedupResult

PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "conf").rglob("*.md"),
        *(path for path in (ROOT / "infra").glob("*.md") if path.name != "LOG.md"),
        *(ROOT / "infra" / "docs").rglob("*.md"),
        *(ROOT / ".github" / name for name in ("SECURITY.md", "SUPPORT.md")),
    ]
)
README_LINES = 150
MEDIAN_WORDS, MOST_WORDS = 20, 40
VAGUE = {"how", "why", "why so", "here", "this", "link", "as above", "above", "below"}
BANNED = {
    "anew": "again",
    "as ever": "as before",
    "begun": "started",
    "begins? with": "start from",
    "beside": "next to",
    "drop (it|one)": "remove",
    "goes on": "resumes, continues",
    "gone on with": "resumed",
    "held against": "compared with",
    "(?<!there )(is|are|was) no(?! longer)(?! more)": "is not a",
    "likewise": "also",
    "mends?": "fix",
    "tells?": "reports",
    "told": "reports, set",
    "whoever": "anyone who",
    "wherever": "where",
    "utilises?": "use",
    "\\d x faster": "times as fast",
    "certainly (faster|slower)": "faster, with a 95 % interval above 1",
}
"""Expressions that readers stumble over, with what to write instead."""
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc(?:set)?=\"?(?:https?:)?//[^\s\">]+"
    r"|<link\b[^>]*\bhref=\"?(?:https?:)?//[^\s\">]+|(?:@import\s+|url\()[\"']?(?:https?:)?//[^\s\"')]+"
)
"""What a browser fetches from another host when it opens a page."""


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def text_of(path):
    """The text of a document without blocks, comments and tables' rulers; code and links are one word or their text."""
    text = FENCE.sub("", path.read_text())
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(    .*|\|[-:| ]+\|)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`", "CODE", text)
    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)


def sentences(path):
    """The sentences of a document as words; headings, items of lists and cells of tables stand alone."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#>|]|\d+\.) ?)|(?<!\\)\|", text_of(path))
    found = [one for block in blocks for one in re.split(r"(?<=[.!?:])[)*\"]*\s+(?=[A-Z\"(*])", block)]
    return [words for one in found if (words := re.findall(r"[\w%$][\w.,'/%-]*", one))]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_sentences_are_short(path):
    lengths = [len(words) for words in sentences(path)]
    assert [" ".join(words) for words in sentences(path) if len(words) > MOST_WORDS] == []
    assert statistics.median(lengths) < MEDIAN_WORDS


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_words_are_plain(path):
    text = " ".join(text_of(path).split())
    found = [
        f"{text[max(0, match.start() - 40) : match.end() + 20]} -> {instead}"
        for word, instead in BANNED.items()
        for match in re.finditer(rf"(?<![\w-]){word}(?![\w-])", text, re.IGNORECASE)
    ]
    assert found == []


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_links_name_their_targets(path):
    texts = re.findall(r"(?<!!)\[([^\]]+)\]\(", FENCE.sub("", path.read_text()))
    assert [text for text in texts if text.strip("`*. ").lower() in VAGUE] == []


@pytest.mark.parametrize("path", reference.pages(), ids=names(reference.pages()))
def test_generated_references_are_up_to_date(path):
    assert path.read_text() == reference.pages()[path], "run infra/docs/generate"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), ("", '""'), (1e-4, "0.0001"), ((0.75, 4 / 3), "[0.75, 1.33333]"), ([], "[]")],
)
def test_defaults_are_shown_as_yaml(value, text):
    assert reference.yaml_value(value) == text


def code():
    """The text of the product's modules and scripts by their paths."""
    paths = [path for folder in ("conf", "flows", "tasks") for path in (ROOT / folder).rglob("*.py")]
    paths += [path for path in (ROOT / "infra").rglob("*") if path.is_file() and path.suffix in ("", ".py", ".sbatch")]
    return {path: path.read_text(errors="ignore") for path in paths if "docs" not in path.parts}


def documented(name):
    """What stands in code in a page of the reference."""
    return set(re.findall(r"`([^`]+)`", FENCE.sub("", (ROOT / "infra" / "docs" / "reference" / name).read_text())))


def test_every_tag_is_documented():
    found = {
        tag
        for text in code().values()
        for tag in re.findall(r'"(paceline\.(?!tasks\.|flows\.|sources|models")[a-z_.]+)"', text)
    }
    assert len(found) > 40
    assert found - documented("outputs.md") == set()


def test_every_metric_is_documented():
    kinds = (
        "compile|cost|data|energy|machine|memory|predict|prediction|recovery|speedup|study|sweep|test|throughput|time"
    )
    pattern = rf'"((?:{kinds}|train)/[a-z_]+)"'
    found = {metric for text in code().values() for metric in re.findall(pattern, text)}
    assert len(found) > 50
    assert found - documented("outputs.md") == set()


def test_every_key_of_a_result_is_documented():
    trees = [ast.parse(text) for path, text in code().items() if path.is_relative_to(ROOT / "flows")]
    literals = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [{key.value for key in node.keys if isinstance(key, ast.Constant)} for node in literals]
    results = [found for found in keys if "tracking_uri" in found]
    assert len(results) > 5
    records = (SpeedupResult, EvaluateResult, Prediction, ComparedRow, Finding)
    fields = {name for record in records for name in record.model_fields}
    assert set().union(*results, fields) - {"table"} - documented("outputs.md") == set()


def test_every_variable_is_documented():
    own = {name for text in code().values() for name in re.findall(r"\bPACELINE_[A-Z_]*[A-Z]\b", text)}
    site = {name for text in code().values() for name in re.findall(r'validation_alias="(\w+)"', text)}
    assert len(site) > 5
    assert (own | site | set(QUIET_ENVIRONMENT)) - documented("environment.md") == set()


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"type": "integer", "minimum": 1}, "integer (>= 1)"),
        ({"anyOf": [{"type": "number"}, {"const": "auto"}, {"type": "null"}]}, "number, or `auto`, or `null`"),
        ({"enum": [1, 2, 6], "type": "integer"}, "one of `1`, `2`, `6`"),
        ({"type": "array", "items": {"type": "string"}}, "list, each item: text"),
        ({"type": "array", "prefixItems": [{"type": "number"}] * 2}, "list of number and number"),
        ({"type": "string", "pattern": r"^(?:[a-z]+)$(?!\n)"}, "text (matches `^[a-z]+$`)"),
    ],
)
def test_types_are_shown_in_words(field, text):
    assert reference.describe_type(field) == text


@pytest.mark.parametrize(
    ("source", "place", "link", "expected"),
    [
        ("infra/docs/README.md", "README.md", "[Run](tutorials/first-run.md#x)", "[Run](tutorials/first-run.md#x)"),
        ("infra/docs/README.md", "README.md", "[Presets](../../conf/README.md)", "[Presets](outside/presets.md)"),
        ("infra/docs/README.md", "README.md", "[Log](../LOG.md)", "Log (`infra/LOG.md`)"),
        ("infra/docs/README.md", "README.md", "[MLflow](https://mlflow.org)", "[MLflow](https://mlflow.org)"),
        ("README.md", "outside/overview.md", "![A](infra/pictures/a.svg)", "![A](pictures/a.svg)"),
        ("README.md", "outside/overview.md", "[Docs](infra/docs/README.md)", "[Docs](../README.md)"),
        ("README.md", "outside/overview.md", "[`LICENSE`](LICENSE)", "`LICENSE`"),
        (".github/SUPPORT.md", "outside/support.md", "[S](SECURITY.md)", "[S](security.md)"),
    ],
)
def test_links_work_on_the_website(source, place, link, expected):
    assert links.linked(link, ROOT / source, place) == expected


def test_blocks_are_no_links():
    text = "```\n[a](../LOG.md)\n```\n[a](../LOG.md)"
    assert links.linked(text, ROOT / "infra/docs/README.md", "README.md").startswith("```\n[a](../LOG.md)\n```\na")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The website, built in strict mode: a warning, such as a broken link or a page outside of the menu, fails it."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [ROOT / "infra" / "docs" / "build", directory], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_website_has_every_page(site):
    expected = {path.with_suffix(".html") for path in (ROOT / "infra" / "docs").rglob("*.md")}
    places = {path.relative_to(ROOT / "infra" / "docs") for path in expected if path.stem != "README"}
    assert {str(place) for place in places if not (site / place).exists()} == set()
    assert (site / "index.html").exists()
    assert (site / "outside" / "overview.html").exists()


def test_website_loads_nothing_from_the_internet(site):
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert files
    assert {str(path): found for path in files if (found := LOADED.findall(path.read_text()))} == {}


def test_website_searches_without_a_server(site):
    assert (site / "search" / "search_index.js").exists()
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium; on Debian, as root: apt-get install chromium")
    flags = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")
    flags += (
        "disable-component-update",
        "disable-sync",
        "virtual-time-budget=20000",
        f"user-data-dir={site / '.chromium'}",
    )
    page = f"{(site / 'index.html').as_uri()}?q=max_rejected_fraction"
    done = subprocess.run(
        [program, "--headless", *(f"--{flag}" for flag in flags), "--dump-dom", page],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert 'href="reference/settings.html' in done.stdout.partition("md-search-result__list")[2]
