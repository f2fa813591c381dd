"""What the user's code logs as hyperparameters is in files, as with Lightning's default logger."""

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from paceline.tasks.train.rank.file_logger import FileLogger


class Module(pl.LightningModule):
    """Logs hyperparameters in a hook, besides those that Lightning logs for it."""

    def __init__(self, logged):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.logged = torch.nn.Linear(4, 1), logged

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def setup(self, stage):
        if self.logged:
            self.logger.log_hyperparams(self.logged)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 4), batch_size=4)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("logged", [{"num_weights": 5, "layers": {"first": 4}}, {}])
def test_hyperparameters_of_the_users_code_are_in_files(tmp_path, logged):
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False}
    files = FileLogger(None, tmp_path, "run")
    pl.Trainer(**options, logger=files, enable_progress_bar=False, enable_model_summary=False).fit(Module(logged))
    written = [yaml.safe_load(path.read_text()) for path in tmp_path.rglob("hparams.yaml")]
    assert [values for values in written if values] == ([logged] if logged else [])
