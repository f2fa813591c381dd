"""The training step: forward, backward and update, eager, compiled or as a CUDA graph."""
