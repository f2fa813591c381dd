"""What is stored with a run, from files and texts that others have written."""

import subprocess

import pytest

from paceline.conf.environment import Environment
from paceline.conf.load import load
from paceline.tasks.track import environment, store
from paceline.tasks.track import run as tracking

PLANTED = """password: planted0
AWS_SECRET_ACCESS_KEY = "planted1 planted1"
store = "s3://key:planted2@bucket/x?X-Amz-Signature=planted3"
headers = {"Authorization": "Bearer planted4"}
harmless = 5
"""


@pytest.fixture
def handle(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    site, config = Environment(), load("digits")
    experiment_id = store.check_store(site.tracking_uri, "documents", site.artifact_root)
    return tracking.begin(site.tracking_uri, experiment_id, config, {})


def stored(handle, name, place):
    place.mkdir()
    with open(handle.client.download_artifacts(handle.run_id, name, str(place)), "rb") as stream:  # noqa: PTH123
        return stream.read()


def test_what_is_not_committed_is_stored_without_credentials(handle, tmp_path, monkeypatch):
    place = tmp_path / "repository"
    place.mkdir()
    (place / "preset.yaml").write_text("harmless = 4\n")
    author = ("-c", "user.name=x", "-c", "user.email=x@x")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", place, *command], check=True)
    (place / "preset.yaml").write_text(PLANTED)
    monkeypatch.setattr(environment, "REPOSITORY", place)
    monkeypatch.setattr("sys.argv", ["paceline", "run", "x", "--token=planted5"])
    tracking.log_document(handle, "environment.json", environment.describe_environment((), ()))
    content = stored(handle, "environment.json", tmp_path / "there")
    assert b"+harmless = 5" in content
    assert b"planted" not in content


def test_files_of_text_lose_theirs_and_files_of_bytes_stay_as_they_are(handle, tmp_path):
    for name, is_text in (("log.txt", True), ("rejected.jsonl", True), ("weights.pt", False)):
        (tmp_path / name).write_bytes(PLANTED.encode() + b"\xff")
        tracking.log_document(handle, name, tmp_path / name)
        content = stored(handle, name, tmp_path / f"there-{name}")
        assert (b"planted" not in content) == is_text
        assert is_text or content == (tmp_path / name).read_bytes()
