"""Decoding: drafting, verification, and the jitted program that is a whole generation."""
