"""What every group of settings is, and the kinds of values that several of them have."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from conf.credentials import Text

_NAME = r"^[A-Za-z][\w.-]{0,63}$"


def _is_name(text: str) -> str:
    if re.match(_NAME, text) is None:
        raise ValueError("no name")
    return text


OwnName = Annotated[Text, AfterValidator(_is_name), Field(json_schema_extra={"pattern": _NAME})]
"""Of a source or a model that an installed package offers, see `conf.plugins`."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
