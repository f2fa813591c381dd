"""How good a trained model is on the test split."""
