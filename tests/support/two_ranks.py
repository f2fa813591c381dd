"""Two ranks of own Lightning code as processes, as the training group starts them, without a flow."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from paceline.tasks.records.training import ModuleResult
from paceline.tasks.train.launch.supervisor import free_port
from tests.conftest import RANK_MODULE
from tests.support.own_lightning import PACKAGE

GROUP_SECONDS = 5
SHORT_PATIENCE = (
    "-c",
    f"""import runpy
from paceline.tasks.train.rank import process_group
process_group.GROUP_SECONDS = {GROUP_SECONDS}
runpy.run_module("{RANK_MODULE}", run_name="__main__", alter_sys=True)
""",
)
"""Starts a rank whose group waits so long, and no longer, where all ranks do the same."""


def two_specs(make_spec, **options):
    """The specifications of two ranks."""
    port = free_port()
    return [make_spec(ranks=(rank, 2, port), **options) for rank in range(2)]


def start_two(make_spec, start=("-m", RANK_MODULE), **options):
    """The specifications of two ranks, and their processes."""
    specs = two_specs(make_spec, **options)
    return specs, start_ranks(specs, start)


def start_ranks(specs, start=("-m", RANK_MODULE)):
    """The processes of the ranks of some specifications."""
    own = [str(PACKAGE.with_name(name)) for name in ("text", "shapes")]
    paths = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for spec in specs:
        path = Path(spec.directory) / "spec.json"
        path.write_text(spec.model_dump_json())
        said = (Path(spec.directory) / "said.txt").open("w")
        command = [sys.executable, *start, str(path)]
        processes.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=said))
    return processes


@contextmanager
def ended(processes):
    """The ranks are killed at the end of the body, if they have not ended."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def train_in_two_processes(make_spec, start=("-m", RANK_MODULE), **options):
    """Result of the first of two ranks, which both end well."""
    specs, processes = start_two(make_spec, start, **options)
    with ended(processes):
        assert [process.wait(150) for process in processes] == [0, 0]
    return result_of(specs[0])


def result_of(spec):
    """The result of a rank that has ended well."""
    return ModuleResult.model_validate_json((Path(spec.directory) / "result.json").read_text())


def said_by(spec):
    """What a rank has written to its log."""
    return (Path(spec.directory) / "said.txt").read_text()
