"""Length of the trainings of these scripts, and a trainer without output."""

import os

NUM_STEPS = int(os.environ.get("NUM_STEPS", "300"))
TRAINER = {
    **{"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}
