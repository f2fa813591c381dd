"""`paceline watch`: the user's own training script, unchanged, with an account of its speed."""

import argparse
import os
import sys
from argparse import Namespace
from pathlib import Path

from paceline.flows.commands.console import JSON, argument, command
from paceline.flows.lifecycle import pool
from paceline.tasks.errors import InputError, one_line

EXAMPLE = "paceline watch train.py --epochs 3"


@command(
    (EXAMPLE, "paceline watch --no-replay train.py"),
    argument("--no-replay", "read no batch before its step; for a data set that changes with the training"),
    JSON,
    argument("script SCRIPT", "training script: a loop of PyTorch, or Lightning's Trainer"),
    argument("arguments ARGS", "arguments of the script", nargs=argparse.REMAINDER),
)
def watch(options: Namespace) -> None:
    """Run your own training script unchanged, and account for its speed."""
    path = Path(options.script)
    try:
        compile(path.read_bytes(), options.script, "exec", dont_inherit=True)
    except OSError as error:
        fault = f"paceline watch {options.script}: {error.strerror}"
        raise InputError(fault, hint=f"for example: {EXAMPLE}", setting="SCRIPT") from error
    except (SyntaxError, ValueError) as error:
        fault = f"paceline watch {options.script}: this is not a Python script ({one_line(error)})"
        raise InputError(fault, hint=f"python {options.script}", setting="SCRIPT") from error
    replay = ("no-replay" if options.no_replay else "replay") + ("-json" if options.json else "")
    program = [sys.executable, "-P", "-m", "paceline.tasks.watch.program", replay, options.script, *options.arguments]
    sys.stdout.flush()
    # The process becomes the script: signals and exit status are its own. Its variables are those of the user.
    os.execve(sys.executable, program, pool.environment)
