"""Measurements: lossless output, whole decodings, and the parts of a step."""
