"""Isolation of the whole session, the one place that finds test data, and guards against what a test may leave behind.

Test data: `PACELINE_TEST_DATA` names a directory, by default `../shared/data` beside the repository; tests that need a
file which is not there skip themselves.
"""

import logging
import os
import re
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from paceline.conf.environment import QUIET_ENVIRONMENT

ROOT = Path(__file__).parents[1]
ARCHIVE = "cifar10_jpeg.tar.xz"
SAMPLE = re.compile(r"(?P<split>train|test)/(?P<class_name>[a-z]+)/(?P<number>\d{4})\.jpg")
NUM_SUBSET = {"train": 200, "test": 50}  # of each of the 10 classes
RANK_MODULE = "paceline.tasks.train.rank.main"
SESSION_VARIABLE = "PACELINE_TEST_SESSION"  # inherited by all that the tests start, orphans included
STATE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
SLOW_SECONDS = 900
"""Until a slow test is given up: several runs of the program, on a machine that does other work too."""
MARKER_OF_FOLDER = {"gpu": pytest.mark.gpu, "benchmarks": pytest.mark.benchmark}

# What a developer's shell or a batch system may have set, and would change what the tests see.
FOREIGN_PREFIXES = ("PACELINE_", "PREFECT_", "MLFLOW_", "DASK_", "SLURM_", "TORCHELASTIC_", "NCCL_", "GLOO_")
FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# A deadline per example measures the neighbours on a shared machine, not the code.
hypothesis.settings.register_profile("paceline", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("paceline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures", type=Path, metavar="DIR", help="keep pictures of the pages there (tests marked slow)"
    )
    parser.addoption("--faults", type=int, default=6, metavar="N", help="inject N faults in test_chaos.py (default: 6)")
    parser.addoption("--faults-seed", default="1", metavar="SEED", help="draw another list of faults")
    parser.addoption(
        "--faults-record", type=Path, metavar="FILE", help="continue the list of faults after those of this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Isolate before any test module imports an engine: Prefect reads its settings at import."""
    state = tempfile.TemporaryDirectory(prefix="paceline-tests-", ignore_cleanup_errors=True)
    config.stash[STATE] = state
    for name in list(os.environ):
        if (name.startswith(FOREIGN_PREFIXES) and name != "PACELINE_TEST_DATA") or name in FOREIGN_NAMES:
            del os.environ[name]
    os.environ |= QUIET_ENVIRONMENT | {
        "PACELINE_HOME": f"{state.name}/paceline",
        "PREFECT_HOME": f"{state.name}/prefect",
        "MPLBACKEND": "Agg",
        "PACELINE_WARM": "off",  # in a terminal, a command would leave a process behind
        SESSION_VARIABLE: uuid.uuid4().hex,
    }


def pytest_unconfigure(config: pytest.Config) -> None:
    logging.raiseExceptions = False  # Prefect's temporary server logs its end at exit, to pytest's closed stderr
    if STATE in config.stash:
        config.stash[STATE].cleanup()


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if marker := MARKER_OF_FOLDER.get(_folder(item)):
            item.add_marker(marker)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU; torch sees none")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The directory with test data."""
    return Path(os.environ.get("PACELINE_TEST_DATA") or ROOT / "../shared/data").resolve()


@pytest.fixture(scope="session")
def cifar10_archive(test_data: Path) -> Path:
    """All of CIFAR-10 as JPEG files in one archive."""
    archive = test_data / ARCHIVE
    if not archive.is_file():
        pytest.skip(f"no {ARCHIVE} in {test_data}; set PACELINE_TEST_DATA to the directory that holds it")
    return archive


@pytest.fixture(scope="session")
def cifar10_jpeg_root(cifar10_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 60,000 images as `{train,test}/<class>/NNNN.jpg`, for reading only. About 10 s, once per session."""
    root = tmp_path_factory.mktemp("cifar10")
    num_unpacked = _unpack(cifar10_archive, root, lambda sample: True)
    assert num_unpacked == 60_000
    return root


@pytest.fixture(scope="session")
def cifar10_subset(cifar10_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 200 training and 50 test images of each class, laid out alike, for reading only. About 3 s."""
    root = tmp_path_factory.mktemp("cifar10-subset")
    num_unpacked = _unpack(cifar10_archive, root, lambda sample: int(sample["number"]) < NUM_SUBSET[sample["split"]])
    assert num_unpacked == 10 * sum(NUM_SUBSET.values())
    return root


@pytest.fixture
def no_rank_left() -> Iterator[None]:
    """Fail a test that leaves a rank's process behind, and end that process; in force for all of tests/integration."""
    yield
    deadline = time.monotonic() + 5.0  # ranks that were told to end may still be doing so
    while (ranks := _ranks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    if ranks:
        pytest.fail(f"left {len(ranks)} rank(s) behind (now killed): {', '.join(str(rank.pid) for rank in ranks)}")


@pytest.fixture(autouse=True)
def _guards(request: pytest.FixtureRequest) -> Iterator[None]:
    if _folder(request.node) == "integration":
        request.getfixturevalue("no_rank_left")
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("left a process group behind (now destroyed)")


def _folder(item: pytest.Item) -> str:
    """Name of the folder right under tests/ that holds the test."""
    return item.path.relative_to(ROOT / "tests").parts[0]


def _unpack(archive: Path, root: Path, wanted: Callable[[re.Match[str]], bool]) -> int:
    """Stream the wanted samples out of the archive; their number."""
    num_unpacked = 0
    with tarfile.open(archive, "r|xz") as members:
        for member in members:
            if not member.isfile():
                continue
            sample = SAMPLE.fullmatch(member.name)
            assert sample, f"{member.name} in {archive} is not <split>/<class>/NNNN.jpg"
            if wanted(sample):
                path = root / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(members.extractfile(member).read())
                num_unpacked += 1
    return num_unpacked


def _ranks() -> list[psutil.Process]:
    """Living rank processes of this session: descendants, and orphans that carry the session's mark."""
    descendants = {process.pid for process in psutil.Process().children(recursive=True)}
    mark = os.environ[SESSION_VARIABLE]
    ranks = []
    for process in psutil.process_iter():
        try:
            if RANK_MODULE not in process.cmdline() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in descendants or process.environ().get(SESSION_VARIABLE) == mark:
                ranks.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return ranks
