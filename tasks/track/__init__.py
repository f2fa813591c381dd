"""Tracking: the only code that imports mlflow."""
