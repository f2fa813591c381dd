"""The base class of all groups of settings, and types of values that several groups have."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from paceline.conf.credentials import WITHOUT, holds_credential


@dataclass(frozen=True)
class Shape:
    """A constraint of a text: its pattern, which Prefect's form checks too, and the rule in words for the refusal."""

    pattern: str  # of all of the text, line breaks included; without `^` and `$`
    rule: str  # such as "is not the name of a network interface, such as eth0"

    def check(self, text: str) -> str:
        """Return the text if it has the shape; else raise PydanticCustomError."""
        if re.fullmatch(self.pattern, text) is None:
            raise PydanticCustomError("shape", "{rule}", {"rule": self.rule})
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # Python's `$`, by which Prefect's server checks, allows a line break at the end.
        return handler(schema) | {"pattern": rf"^(?:{self.pattern})$(?!\n)"}


def _refuse_credentials(text: str) -> str:
    if holds_credential(text):
        raise PydanticCustomError(
            "credential",
            "holds a credential, and settings are logged; give it through the environment, or through a profile or "
            "configuration file of the file system (AWS_PROFILE, ~/.config/fsspec)",
        )
    return text


Text = Annotated[str, AfterValidator(_refuse_credentials), Field(json_schema_extra={"pattern": WITHOUT})]
"""A text without credentials: settings travel to databases, logs and histories."""
OwnName = Annotated[Text, Shape(r"[A-Za-z][\w.-]{0,63}", "is not a name")]
"""Name of a source or a model of an installed package, see `paceline.conf.plugins`."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
