"""Servers on loopback that are no Dask scheduler, and count who connects."""

import socket
import threading
from contextlib import closing, contextmanager


class Listener:
    """Accepts connections until it is closed.

    Args:
        greeting: bytes that each connection gets at once.
        answers: whether a connection is closed after the first bytes that it sends.
    """

    def __init__(self, greeting=b"", answers=False):
        self._greeting = greeting
        self._answers = answers
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open = []
        self.num_connections = 0
        self.port = self._socket.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        for connection in self._open:
            connection.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_connections += 1
            self._open.append(connection)
            threading.Thread(target=self._talk, args=[connection], daemon=True).start()

    def _talk(self, connection):
        try:
            if self._answers:
                connection.recv(1024)
            connection.sendall(self._greeting)
            if self._answers:
                connection.close()
        except OSError:
            return


@contextmanager
def listening(greeting=b"", answers=False):
    """A listener while the body lasts."""
    with closing(Listener(greeting, answers)) as found:
        yield found
