"""The plain script: `python main.py fit --config config.yaml`."""

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(save_config_callback=None)
