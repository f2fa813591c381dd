"""A relay of TCP connections to a server, which withholds what a client sends with some words in it."""

import socket
import threading
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

CHUNK_BYTES = 2**16


@contextmanager
def tcp_relay(url, withheld):
    """The http address of a relay, and an event that is set when something has been withheld.

    Args:
        url: of the server.
        withheld: bytes; neither a piece that holds them nor what follows it is passed on.
    """
    parts, taken = urlsplit(url), threading.Event()

    def pump(source, target, words):
        with suppress(OSError):
            while piece := source.recv(CHUNK_BYTES):
                if words and words in piece:
                    taken.set()
                    return
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def accept(listening):
        while True:
            try:
                client, _ = listening.accept()
                server = socket.create_connection((parts.hostname, parts.port))
            except OSError:
                return
            connections.extend((client, server))
            for source, target, words in ((client, server, withheld), (server, client, b"")):
                threading.Thread(target=pump, args=(source, target, words), daemon=True).start()

    connections = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", taken
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
    for connection in connections:
        connection.close()
