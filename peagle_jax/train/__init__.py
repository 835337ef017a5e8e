"""Training: a target from scratch, a P-EAGLE head (COD sampling), an EAGLE-3 head (test-time
training)."""
