import socket
from types import SimpleNamespace

from tasks.train.group import _listen
from tasks.train.supervise import free_port


def test_a_group_meets_on_its_own_address_and_on_no_other_of_the_host():
    spec = SimpleNamespace(master_address="127.0.0.1", master_port=free_port())
    with socket.socket(fileno=_listen(spec)) as listening:
        assert listening.getsockname() == ("127.0.0.1", spec.master_port)
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", spec.master_port)) != 0
