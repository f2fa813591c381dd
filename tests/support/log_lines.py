"""Log lines of the training stage, passed to a function of a test."""

import logging
from contextlib import contextmanager


@contextmanager
def log_lines(take, name="paceline.tasks.train"):
    """Pass the message of each log record to `take`, whose exceptions the logging call raises."""

    class _Handler(logging.Handler):
        def emit(self, record):
            take(record.getMessage())

    logger, handler = logging.getLogger(name), _Handler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
