import socket
from types import SimpleNamespace

from torch import distributed, nn

from paceline.tasks.train.launch.supervisor import free_port
from paceline.tasks.train.rank.process_group import _listen, average_buffers


def test_a_group_meets_on_its_own_address_and_on_no_other_of_the_host():
    spec = SimpleNamespace(master_address="127.0.0.1", master_port=free_port())
    with socket.socket(fileno=_listen(spec)) as listening:
        assert listening.getsockname() == ("127.0.0.1", spec.master_port)
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", spec.master_port)) != 0


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
