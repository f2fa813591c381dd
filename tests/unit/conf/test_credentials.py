"""No setting can hold a credential, and the form refuses with the same rule as the program."""

import re
import typing

import pytest
from pydantic import BaseModel, ValidationError

from paceline.conf.config import Config
from paceline.conf.credentials import holds_credential
from paceline.conf.load import ConfigError, load
from tests.support.refusals import refused

PLANTED = [
    "s3://AKIAKEY:hunter2@bucket/x",
    "s3://key:hun/ter2@bucket/x",
    "https://hunter2@host/x",
    "simplecache::s3://key:hunter2@bucket/x",
    "https://host/x?X-Amz-Signature=hunter2",
    "https://host/x?sv=1&sig=hunter2",
    "https://host/x?token=hunter2",
    "s3://bucket/x?AWSAccessKeyId=hunter2",
]
FINE = [
    "/data/a@b",
    "s3://bucket/x",
    "abfs://container@account.dfs.core.windows.net/x",
    "sftp://me@host:22/x",
    "http://host:8080/a@b",
    "gs://b/tokens/secret",
    "C:\\data",
]


LISTS = ("cluster.hosts", "cluster.sbatch", "data.classes", "lightning.packages")


def free_texts(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Settings that take any text."""
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += free_texts(kind, f"{prefix}{name}.")
        elif str in (kind, *_parts(kind)) and not any(hasattr(part, "pattern") for part in field.metadata):
            found.append(prefix + name)
    return found


def _parts(kind: object) -> list[object]:
    parts = list(typing.get_args(kind))
    return parts + [inner for part in parts for inner in _parts(part)]


def test_every_setting_that_takes_any_text_refuses_one():
    names = free_texts(Config)
    assert {"data.root", "name", "track.experiment", "cluster.address", "cluster.sbatch"} <= set(names)
    known_patterns = {"model.freeze", "track.register", "cluster.time_limit", "cluster.memory_per_host"}
    mappings = {"lightning.settings", "lightning.given"}  # of LightningCLI; redacted where they are stored
    for name in set(names) - known_patterns - mappings:
        value = "https://me:hunter2@host"
        wrapped = f"[{value}]" if name in LISTS else value
        with refused(name, "AWS_PROFILE", kind=ConfigError) as error:
            load("digits", [f"{name}={wrapped}"])
        assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("root", PLANTED)
def test_credentials_are_refused_by_the_program_and_by_the_form_without_being_told(root):
    with refused("data.root", "AWS_PROFILE", kind=ConfigError) as error:
        load("folder", [f"data.root={root}"])
    assert "ter2" not in str(error.value)
    assert not re.search(pattern_of_the_form(), root)


@pytest.mark.parametrize("root", FINE)
def test_addresses_without_any_are_taken(root):
    assert load("folder", [f"data.root={root}"]).data.root == root
    assert re.search(pattern_of_the_form(), root)
    assert not holds_credential(root)


def pattern_of_the_form() -> str:
    (pattern,) = {
        option["pattern"]
        for option in Config.model_json_schema()["$defs"]["Data"]["properties"]["root"]["anyOf"]
        if "pattern" in option
    }
    return pattern


def test_the_words_of_a_refusal_hold_no_value():
    with pytest.raises(ValidationError) as error:
        Config.model_validate({"name": "password=hunter2"})
    assert "hunter2" not in error.value.errors()[0]["msg"]
