"""A proxy in front of a server, which withholds some requests."""

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SKIPPED = ("transfer-encoding", "connection", "content-length", "server", "date")


@contextmanager
def http_proxy(url, withheld):
    """The address of a proxy, and an event that is set when it has taken a request and does not pass it on.

    Args:
        url: of the server.
        withheld: whether a request (path, body) is not passed on.
    """
    taken, over = threading.Event(), threading.Event()

    class Proxy(BaseHTTPRequestHandler):
        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if withheld(self.path, body):
                taken.set()
                over.wait()
                return
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in SKIPPED:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        over.set()
        server.shutdown()
        server.server_close()
