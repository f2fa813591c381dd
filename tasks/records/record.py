"""Base class of the records, and a choice with its reason."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Choice(Record):
    """A value chosen for the user, with its reason."""

    value: str | int
    reason: str
