"""The ranks of a preset are forked from a process that has imported what they need before there is a worker."""

import json
import signal

import psutil
import pytest

from tests.support.own_lightning import ranks_of, wait_for_checkpoint

SERVER = "paceline.tasks.train.launch.fork_server"
TWO_RANKS = ["digits", "recipe.num_epochs=12", "model.width=8", "execution.num_devices=2", "speedup.baseline=none"]


def forked(process):
    """The ranks among the processes of a command that are forks of a fork server, in the order of their start."""
    return [rank for rank in ranks_of(process) if SERVER in psutil.Process(rank.ppid()).cmdline()]


@pytest.mark.slow
def test_a_run_whose_fork_server_is_killed_goes_on_and_learns_the_same(paceline):
    losses = []
    for is_killed in (False, True):
        process = paceline("run", *TWO_RANKS, "execution.checkpoint_steps=4", "--json")
        wait_for_checkpoint(process, "step-0000000004.ckpt")
        first, second = forked(process)
        assert first.ppid() == second.ppid()
        server = psutil.Process(first.ppid())
        assert server.ppid() == process.pid
        if is_killed:
            server.send_signal(signal.SIGKILL)
        out, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        trained = json.loads(out.splitlines()[-1])["train"]
        assert len(trained["restarts"]) == is_killed
        losses.append(trained["final_loss"])
        assert not server.is_running()
    assert losses[0] == losses[1]


def test_ranks_are_programs_of_their_own_where_a_loop_for_comparison_starts_with_them(program):
    process = program("run", "digits", "recipe.num_epochs=50", "model.width=4", "execution.checkpoint_steps=4")
    wait_for_checkpoint(process, "step-0000000004.ckpt")
    assert ranks_of(process)
    assert not forked(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
