"""Drafting, verifying, and the one jitted program that is a whole generation."""
