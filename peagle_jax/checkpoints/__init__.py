"""Checkpoints: draft heads, targets and training runs, read, written, converted and described."""
