import pytest

from tasks.redact import redact


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+asyncpg://user:hunter2@db:5432/x",
        "https://me:hunter2@mlflow/health",
        "s3://bucket/key?X-Amz-Signature=hunter2&a=1",
        "--password=hunter2",
        "error at http://u:hunter2@h:1/p and again http://u:hunter2@h",
    ],
)
def test_credentials_are_taken_out(text):
    assert "hunter2" not in redact(text)


def test_plain_text_stays():
    plain = "run 42 at tcp://host:8786 and /a/b@c, accuracy=0.9"
    assert redact(plain) == plain
