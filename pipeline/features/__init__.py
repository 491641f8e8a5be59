"""Samples in, target states out. Torch loads only when there is something to compute."""
