"""Whole jobs on top of everything else: demo, generation, extraction, training with evaluation."""
