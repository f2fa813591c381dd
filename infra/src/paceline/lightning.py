"""For your own Lightning script: `Trainer(callbacks=[SpeedAccount()])`."""

from paceline.tasks.watch.callback import SpeedAccount

__all__ = ["SpeedAccount"]
