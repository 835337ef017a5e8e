"""Measuring: exactness, whole decodings, the parts of a step, and where a number comes from."""
