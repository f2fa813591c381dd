"""Which preset or file of LightningCLI a command reads."""

from argparse import Namespace

import pytest

from paceline.conf.hints import HintedError
from paceline.flows.commands.own_code import load_config


@pytest.mark.parametrize(
    ("preset", "fault"),
    [
        ("none.yaml", "no preset or file is called none.yaml"),
        ("digits", "--code . has no meaning for a preset"),
    ],
)
def test_a_directory_of_code_needs_a_file_of_lightningcli(preset, fault):
    with pytest.raises(HintedError, match=f"^{fault}"):
        load_config(Namespace(preset=preset, code=".", overrides=["model.init_args.width=3"]))
