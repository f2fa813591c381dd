"""A real server of S3 in a process of its own, and a way to it on which a test breaks things."""

import http.client
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import s3fs

from infra.services.home import free_port

SECRET = "planted-secret-of-the-store-0"
USER = {"AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED00", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
START_SECONDS = 60
HELD_SECONDS = 10
ANSWERS = {
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "403": (403, "AccessDenied", "Access Denied"),
}


class Way:
    """A proxy before a store. Faults are for requests of objects alone: `GET /BUCKET/KEY`."""

    def __init__(self, port):
        self.store_port = port
        self.gets = []
        """Paths of the objects that were asked for."""
        self.most_at_once = 0
        self.num_faults = 0
        self._at_once = 0
        self._lock = threading.Condition()
        self.clear()
        way = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                way._serve(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

            def handle_error(self, *_):  # a client that gives up
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def clear(self):
        """No faults, nothing counted, nobody waited for."""
        self.gets.clear()
        self.most_at_once = self.num_faults = 0
        self.fault = lambda number, path: None
        """By the number of a request and its path: one of ANSWERS, `reset`, `truncate` or None."""
        self.hold_until = 1
        """Requests that are on their way together before any is answered."""

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, request):
        path, _, query = request.path.partition("?")
        if request.command != "GET" or path.count("/") < 2 or "list-type" in query:
            self._forward(request)
            return
        with self._lock:
            number = len(self.gets)
            self.gets.append(path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._lock.notify_all()
            self._lock.wait_for(lambda: self.most_at_once >= self.hold_until, HELD_SECONDS)
            fault = self.fault(number, path)
            self.num_faults += fault is not None
        try:
            self._forward(request, fault)
        finally:
            with self._lock:
                self._at_once -= 1

    def _forward(self, request, fault=None):
        if fault == "reset":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
            return
        if fault in ANSWERS:
            status, code, message = ANSWERS[fault]
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._answer(request, status, {"Content-Type": "application/xml"}, body)
            return
        store = http.client.HTTPConnection("127.0.0.1", self.store_port)
        asked = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        store.request(request.command, request.path, asked, dict(request.headers))
        answer = store.getresponse()
        body = answer.read()
        store.close()
        self._answer(request, answer.status, dict(answer.getheaders()), body, fault)

    def _answer(self, request, status, headers, body, fault=None):
        request.send_response_only(status)
        length = {name: value for name, value in headers.items() if name.lower() == "content-length"}
        headers = {
            name: value for name, value in headers.items() if name.lower() not in ("content-length", "connection")
        }
        for name, value in (headers | (length or {"Content-Length": str(len(body))})).items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if fault == "truncate" else body)


class Store:
    """The server, the way to it, and hands to fill it with."""

    def __init__(self, port):
        self.port = port
        self.way = Way(port)
        self.environment = {**USER, "AWS_ENDPOINT_URL": self.way.url}
        self.hands = s3fs.S3FileSystem(
            key=USER["AWS_ACCESS_KEY_ID"],
            secret=SECRET,
            endpoint_url=f"http://127.0.0.1:{port}",
            client_kwargs={"region_name": "us-east-1"},
            use_listings_cache=False,
        )

    def fill(self, bucket, directory):
        """A bucket with all files below a directory; the root that names them."""
        self.hands.call_s3("create_bucket", Bucket=bucket)
        files = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
        self.hands.pipe({f"{bucket}/images/{path.relative_to(directory)}": path.read_bytes() for path in files})
        return f"s3://{bucket}/images"

    @contextmanager
    def asking_who(self):
        """The store knows its users from now on, and has none."""
        place = f"http://127.0.0.1:{self.port}/moto-api/reset-auth"
        httpx.post(place, content=b"0").raise_for_status()
        try:
            yield
        finally:
            httpx.post(place, content=b"inf").raise_for_status()


@contextmanager
def object_store():
    """One that runs."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | USER)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            assert process.poll() is None, "the store has ended"
            assert time.monotonic() < deadline, "the store does not answer"
            time.sleep(0.1)
        store = Store(port)
        yield store
        store.way.close()
    finally:
        process.terminate()
        process.wait()


def _answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/moto-api/").is_success
    except httpx.TransportError:
        return False
