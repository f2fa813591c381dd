"""The competent loop: the baseline that a good engineer writes in plain PyTorch."""
