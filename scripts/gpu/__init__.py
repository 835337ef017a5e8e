"""The parts of scripts/gpu_suite.py."""
