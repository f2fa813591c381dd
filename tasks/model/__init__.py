"""The networks and how they learn: one LightningModule for all of them."""
