"""Quality of a trained model on the test split."""
