import io
import json
import logging

import pytest

from paceline.tasks.errors import RunError
from paceline.tasks.redact import redact, redact_errors, redact_logs, redact_tree

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalr/XUtnFEMI+K7MDENG",
    "MLFLOW_TRACKING_PASSWORD": "hunter2-of-mlflow",
    "PREFECT_API_AUTH_STRING": "admin:hunter2-of-prefect",
    "HTTPS_PROXY": "http://me:hunter2-of-proxy@proxy:3128",
}


@pytest.fixture
def environment(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+asyncpg://user:hunter2@db:5432/x",
        "https://me:hunter2@mlflow/health",
        "https://hunter2@host/x",
        "s3://AKIA:hun/ter2@bucket/x",
        "simplecache::s3://key:hunter2@bucket/x",
        "zip://*.jpg::https://me:hunter2@host/x.zip",
        "s3://bucket/key?X-Amz-Signature=hunter2&a=1",
        "https://x.blob.core.windows.net/c?sv=1&sig=hunter2",
        "https://x/y?key=hunter2",
        "--password=hunter2",
        "AWS_SECRET_ACCESS_KEY='hunter2 hunter2'",
        "password: hunter2",
        '{"token": "hunter2"}',
        '"headers": "{\\"api-key\\": \\"hunter2\\"}"',
        "secret=&quot;hunter2&quot;",
        "Authorization: Basic hunter2",
        "authorization: Bearer hunter2",
        "error at http://u:hunter2@h:1/p and again http://u:hunter2@h",
        "-----BEGIN EC PRIVATE KEY-----\nhunter2\n-----END EC PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2",
        "ghp_hunter2hunter2hunter2hunter2",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.hunter2",
    ],
)
def test_credentials_are_taken_out(text):
    assert not {"hunter2", "hun/ter2"} & set(redact(text).replace('"', " ").replace("&", " ").split())
    assert "hunter2" not in redact(text)
    assert "ter2" not in redact(text)


@pytest.mark.parametrize(
    "plain",
    [
        "run 42 at tcp://host:8786 and /a/b@c, accuracy=0.9",
        "http://host:5000/#/models/NAME@champion and tcp://[::1]:8786/x@y",
        "abfs://container@account.dfs.core.windows.net/x and sftp://me@host/x",
        "significant=True, tokenizer=bpe, tokens=5, the key=5, bypass=1",
        "signature:\n  inputs: '[]'",
        "experiment paceline",
    ],
)
def test_plain_text_stays(plain, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "paceline")  # as plain as a word
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/a/b")
    assert redact(plain) == plain


@pytest.mark.parametrize(
    "secret",
    [
        "wJalr/XUtnFEMI+K7MDENG",
        "wJalr%2FXUtnFEMI%2BK7MDENG",
        "hunter2-of-mlflow",
        "hunter2-of-prefect",
        "hunter2-of-proxy",
    ],
)
def test_secrets_of_the_environment_are_found_whatever_stands_around_them(environment, secret):
    assert secret in f"xx{secret}yy hunter2-{secret}"
    assert secret not in redact(f"xx{secret}yy hunter2-{secret}")


def test_trees_stay_trees(environment):
    tree = {"a": ["hunter2-of-mlflow", 1.5, None], "b": {"c": ("password=x", True)}}
    assert redact_tree(tree) == {"a": ["***", 1.5, None], "b": {"c": ["password=***", True]}}
    json.dumps(redact_tree(tree))


class OwnWordsError(Exception):
    def __str__(self):
        return "hunter2-of-mlflow"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a hunter2-of-mlflow"), ValueError),
        (RunError("https://a:hunter2@b"), RunError),
        (OwnWordsError(), RunError),
    ],
)
def test_errors_keep_their_kind_and_lose_their_secrets(environment, error, kind):
    @redact_errors
    def fail():
        raise error

    with pytest.raises(kind) as raised:
        fail()
    assert "hunter2" not in str(raised.value)


def test_logs_of_all_libraries_go_without_credentials(environment):
    before = logging.getLogRecordFactory()
    stream = io.StringIO()
    logger = logging.getLogger("some.library")
    logger.addHandler(handler := logging.StreamHandler(stream))
    try:
        redact_logs()
        logger.warning("GET %s", "https://me:hunter2@host")
        try:
            raise ValueError("hunter2-of-prefect")
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.removeHandler(handler)
        logging.setLogRecordFactory(before)
    told = stream.getvalue()
    assert "https://***@host" in told
    assert "ValueError: ***" in told
    assert "hunter2" not in told
