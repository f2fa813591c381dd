"""The program `paceline`: it hands a run to a warm pool, or runs the command in this process."""

import sys
import time
from typing import NoReturn

from paceline.flows.lifecycle import pool


def program() -> NoReturn:
    """Run a command as the process `paceline`, and exit."""
    now, processor = time.clock_gettime(time.CLOCK_BOOTTIME), time.process_time()
    status = pool.hand_over(sys.argv)
    if status is not None:
        pool.leave(status)
    from paceline.tasks import host

    host.program_start = host.find_program_start(now, processor)
    pool.end_before_measuring(sys.argv[1:])
    from paceline.flows import cli

    cli.program()


if __name__ == "__main__":
    program()
