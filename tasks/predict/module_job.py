"""A program for a fresh process that predicts with own Lightning code."""

from paceline.tasks.predict.subprocess_job import subprocess_main
from paceline.tasks.records.prediction import ModulePredicted, ModulePrediction


class ModuleJob(ModulePrediction):
    """The prediction as the work of this program."""


def predict_in_process(job: ModuleJob) -> ModulePredicted:
    """Predict; Lightning is imported here, and not in the process of the flow."""
    from paceline.tasks.train.lightning.prediction import predict_module

    return predict_module(job)


if __name__ == "__main__":
    subprocess_main(ModuleJob, predict_in_process)
