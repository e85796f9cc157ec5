"""Optimizer state in pinned host memory, streamed through the device block by block."""
