"""Runs that take the warm pool: the same outcome and the same statuses as in a process of their own."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from mlflow import MlflowClient

from paceline.flows.lifecycle import pool
from tests.conftest import SESSION_VARIABLE
from tests.support.own_lightning import PACKAGE
from tests.support.own_lightning import SMALL as SMALL_TEXT

SMALL = ["run", "digits", "recipe.num_epochs=1", "speedup.baseline=none", "execution.precision=32-true"]
OWN = [*SMALL_TEXT, "speedup.baseline=none"]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Variables of a shell whose runs leave a pool."""
    place = tmp_path_factory.mktemp("warm")
    home = {
        "PACELINE_HOME": str(place / "home"),
        "PREFECT_HOME": str(place / "prefect"),
        "TMPDIR": str(place),
        "XDG_RUNTIME_DIR": "",
        "PACELINE_WARM": "5",
    }
    with pytest.MonkeyPatch.context() as patch:
        variables = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
        # Without the mark of the session: a pool outlives the test that it was started in.
        patch.setattr(pool, "environment", variables | home)
        yield home
        pool.end_pool()


@pytest.fixture
def paceline(site):
    """Starts the program in a process of its own."""

    def start(*words, **streams):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "stdin": subprocess.DEVNULL}
        command = [sys.executable, "-m", "paceline.flows.start", *words]
        return subprocess.Popen(command, env=pool.environment, preexec_fn=default_interrupt, **(pipes | streams))  # noqa: PLW1509

    return start


def default_interrupt():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored where the tests run in the background


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]) if out else {}, err


def ready_pool():
    """The keeper of the pool and all its processes, once they are paused."""
    give_up = time.monotonic() + 120
    while True:
        pid = pool.end_pool(dry_run=True)
        if pid is not None:
            processes = psutil.Process(pid).children(recursive=True)
            if processes and all(one.status() == psutil.STATUS_STOPPED for one in processes):
                return psutil.Process(pid), processes
        assert time.monotonic() < give_up, "no pool has settled"
        time.sleep(0.1)


def wait_until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture
def waiting(paceline):
    """The keeper of a pool that is ready, and its processes."""
    if pool.end_pool(dry_run=True) is None:
        finish(paceline(*SMALL))  # it leaves the first
    return ready_pool()


def cpu_seconds(processes):
    return sum(sum(one.cpu_times()[:2]) for one in processes)


@pytest.mark.slow
def test_the_second_run_is_the_process_of_the_pool(paceline, waiting, site):
    keeper, processes = waiting
    before = cpu_seconds([keeper, *processes])
    time.sleep(2)
    assert cpu_seconds([keeper, *processes]) == before, "it takes CPU time while it waits"
    process = paceline(*SMALL, "--json")
    summary, err = finish(process)
    assert not processes[0].is_running()  # it was the run
    assert "Beginning flow run" in err
    run = MlflowClient(f"sqlite:///{site['PACELINE_HOME']}/mlflow.db").get_run(summary["run_id"])
    assert run.info.status == "FINISHED"
    assert ready_pool()[0] != keeper


@pytest.mark.slow
def test_wrong_input_is_reported_as_ever_and_leaves_the_next_pool(paceline, waiting):
    process = paceline("run", "digits", "recipe.num_epoch=1")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[0].startswith("error: ")
    assert err.splitlines()[1].startswith("hint: ")
    _, alive = psutil.wait_procs(waiting[1], timeout=60)
    assert not alive
    assert ready_pool()[0] != waiting[0]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_in_the_pool_as_any_other(paceline, waiting, site):
    process = paceline(*SMALL, "recipe.num_epochs=5000")
    for line in process.stderr:
        if "MLflow run" in line:
            run_id = re.search(r"MLflow run (\w+)", line)[1]
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "error: interrupted"
    assert MlflowClient(f"sqlite:///{site['PACELINE_HOME']}/mlflow.db").get_run(run_id).info.status == "KILLED"
    psutil.wait_procs(waiting[1], timeout=60)
    assert not any(one.is_running() for one in waiting[1])


def training(paceline, waiting):
    """A run in the pool that trains, and all its processes."""
    process = paceline(*SMALL, "recipe.num_epochs=5000")
    for line in process.stderr:
        if "execution.loading" in line:
            break
    run = waiting[1][0]
    return process, [run, *run.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["command", "keeper"])
def test_the_run_ends_with_its_command_and_its_keeper(paceline, waiting, part):
    process, running = training(paceline, waiting)
    {"command": psutil.Process(process.pid), "keeper": waiting[0]}[part].kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(running, timeout=120)
    assert not alive


@pytest.mark.slow
def test_ctrl_z_suspends_the_run_until_the_shell_continues_it(paceline, waiting):
    process, running = training(paceline, waiting)
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert running[0].status() == psutil.STATUS_STOPPED
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: running[0].status() != psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_reader_that_ends_early_has_the_status_of_a_broken_pipe(paceline, waiting):
    process = paceline(*SMALL, "--json")
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(timeout=300) == 128 + signal.SIGPIPE, err
    assert not waiting[1][0].is_running()
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PACELINE_HOME", "PREFECT_HOME"])
def test_state_that_was_removed_meanwhile_is_made_again(paceline, waiting, name):
    shutil.rmtree(pool.environment[name])
    summary, err = finish(paceline(*SMALL, "--json"))
    assert summary["run_id"]
    assert not re.search("error|Traceback", err)


@pytest.mark.slow
def test_own_code_is_that_of_now(paceline, waiting, tmp_path):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
    shutil.copytree(PACKAGE, tmp_path / "prose")
    model = tmp_path / "prose" / "prose" / "gpt.py"
    words = ["run", str(tmp_path / "prose" / "config.yaml"), "--code", str(tmp_path / "prose"), "--json", *OWN]
    for now in ("one", "two"):
        model.write_text(f"{model.read_text()}\nGPT.training_step = lambda *_: 1 / 0  # {now}\n")
        _, processes = ready_pool()
        process = paceline(*words, f"data.init_args.directory={tmp_path}")
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert f"# {now}" in err
        assert not processes[0].is_running()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["keeper", "API", "worker"])
def test_a_run_after_a_crash_of_the_pool_is_cold(paceline, waiting, part):
    keeper, processes = waiting
    names = {"keeper": keeper}
    names["API"] = next(one for one in processes if any("prefect_api" in word for word in one.cmdline()))
    names["worker"] = next(one for one in processes if any("spawn_main" in word for word in one.cmdline()))
    names[part].kill()
    if part == "keeper":
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
    summary, err = finish(paceline(*SMALL, "--json"))
    assert summary["run_id"]
    assert not re.search("error|Traceback", err)
    assert not processes[0].is_running()


@pytest.mark.slow
def test_clean_ends_the_pool(paceline, waiting):
    keeper, processes = waiting
    _, err = finish(paceline("clean", "--dry-run"))
    assert f"would end the warm pool, process {keeper.pid}" in err
    assert keeper.is_running()
    _, err = finish(paceline("clean"))
    assert f"ended the warm pool, process {keeper.pid}" in err
    _, alive = psutil.wait_procs([keeper, *processes], timeout=60)
    assert not alive


def on_terminal(paceline):
    """What a run writes to a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    process = paceline(*SMALL, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            text += os.read(ours, 65_536)
        except OSError:  # all have closed it
            break
    process.wait(timeout=300)
    os.close(ours)
    return text.decode()


def first_line(text):
    return next(line for line in text.splitlines() if "Beginning" in line)


@pytest.mark.slow
def test_a_terminal_shows_the_same_colours(paceline, waiting, site):
    pool.end_pool()
    cold = on_terminal(paceline)
    _, processes = ready_pool()
    warm = on_terminal(paceline)
    assert not processes[0].is_running()
    assert COLOUR.findall(first_line(cold))
    assert COLOUR.findall(first_line(warm)) == COLOUR.findall(first_line(cold))
    logged = [line for line in warm.splitlines() if " | " in line]
    assert len(set(logged)) == len(logged), "lines are logged twice"
