"""Batches for training and evaluation from a prepared set; the only part of the data stage that imports torch."""
