"""Made-up sweeps with known figures."""

from paceline.tasks.records.record import Choice
from paceline.tasks.sweep.records import SweepResult, Trial
from paceline.tasks.sweep.space import parse_parameters

PARAMETERS = parse_parameters(["recipe.learning_rate=log(1e-3,1)", "recipe.optimizer=[sgd,adamw]"])


def trial(number, rate, optimizer, status="done", *, scores=(0.5, 0.8), begin=0.0, seconds=10.0, **fields):
    return Trial(
        **{
            "number": number,
            "values": {"recipe.learning_rate": rate, "recipe.optimizer": optimizer},
            "run_id": f"{number}abcdef0123456789",
            "status": status,
            "score": scores[-1] if scores and status != "failed" else None,
            "scores": scores,
            "test_score": scores[-1] - 0.01 if status == "done" else None,
            "seconds": seconds,
            "started": 1_000_000.0 + begin,
        }
        | fields
    )


def five_trials():
    """Two at a time: one is pruned, one fails, the fourth is best."""
    return (
        trial(0, 0.01, "sgd", scores=(0.4, 0.6, 0.7), begin=0),
        trial(1, 0.9, "adamw", "failed", scores=(), begin=0, seconds=4, error="training diverged"),
        trial(2, 0.002, "sgd", "pruned", scores=(0.1,), begin=4, seconds=6, error="pruned after epoch 1"),
        trial(3, 0.1, "adamw", scores=(0.5, 0.8, 0.9), begin=10, seconds=10),
        trial(4, 0.05, "sgd", scores=(0.5, 0.7, 0.8), begin=10, seconds=10),
    )


def result_of(trials, parameters=PARAMETERS, **fields):
    return SweepResult(
        **{
            "run_id": "0123456789abcdef",
            "experiment": "paceline",
            "preset": "digits",
            "parameters": parameters,
            "sampler": "tpe",
            "pruner": "asha",
            "at_once": Choice(value=2, reason="2 cores over 1 of each trial"),
            "num_epochs": 3,
            "score_name": "accuracy",
            "trials": trials,
            "seconds": 30.0,
            "hardware": "host: 2 cores",
        }
        | fields
    )
