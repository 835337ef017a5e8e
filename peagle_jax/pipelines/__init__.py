"""Whole jobs that join several rooms: demo, generation, extraction, training with evaluation."""
