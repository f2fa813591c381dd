"""The JSON of commands, each line checked against the schema that `paceline schema` prints."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from paceline.flows.outputs import output_schema


@cache
def validator(command: str) -> Draft202012Validator:
    return Draft202012Validator(output_schema(command))


def told_by(command: str, stdout: str) -> Any:
    """The JSON on the last line of a command's stdout."""
    told = json.loads(stdout.splitlines()[-1])
    validator(command).validate(told)
    return told
