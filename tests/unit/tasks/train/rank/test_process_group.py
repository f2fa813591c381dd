import socket
import subprocess
import sys

import pytest
from torch import distributed, nn

from paceline.tasks.train.launch.supervisor import free_port
from paceline.tasks.train.rank import process_group
from paceline.tasks.train.rank.process_group import _listen, alone, arrive, average_buffers, run_on_all


def test_a_group_meets_on_its_own_address_and_on_no_other_of_the_host():
    port = free_port()
    with socket.socket(fileno=_listen("127.0.0.1", port)) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0


def test_a_network_without_statistics_has_nothing_to_average():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        plain, normed = nn.Linear(2, 2), nn.BatchNorm1d(2)
        weights = plain.weight.detach().clone()
        average_buffers(plain)
        average_buffers(normed)
        assert plain.weight.equal(weights)
        assert normed.running_var.tolist() == [1.0, 1.0]
    finally:
        distributed.destroy_process_group()


def test_a_group_that_the_users_code_has_made_is_left_alone(monkeypatch):
    monkeypatch.setattr(process_group, "_joined", {"number": 1})
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with alone():
            assert arrive(1)
        assert run_on_all(lambda: "a reason", 1) == ("a reason", True)
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()


RANK = """
import sys, time
from types import SimpleNamespace
import torch
from paceline.tasks.train.rank import process_group as group
rank, port, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
group.GROUP_SECONDS = group.ALONE_SECONDS = seconds
spec = SimpleNamespace(world_size=2, rank=rank, master_address="127.0.0.1", master_port=port)
group.join(spec, torch.device("cpu"))  # the other rank may import torch for long
group.GROUP_SECONDS = 1
with group.wait_for_rank_0():
    time.sleep(2.5 if rank == 0 else 0.0)  # an arm that rank 0 compiles
    assert group.broadcast(7.0 + rank) == 7.0
if rank == 1:
    time.sleep(2.5)
try:
    group.broadcast(1.0)  # the time of training is as short as before
except RuntimeError as error:
    raise SystemExit(f"in training: {error}")
"""


@pytest.mark.slow
def test_ranks_wait_long_for_rank_0_alone_and_no_longer_in_training():
    port = free_port()
    command = [sys.executable, "-c", RANK]
    first, second = (
        subprocess.Popen([*command, str(rank), str(port), "60"], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    )
    said = [process.communicate(timeout=200)[1] for process in (first, second)]
    assert "AssertionError" not in "".join(said), said
    assert any("in training: " in text for text in said), said
