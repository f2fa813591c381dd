"""Trains the user's own LightningModule, unchanged, with Lightning's Trainer and its public interfaces."""
