"""Training: P-EAGLE heads (COD sampling), EAGLE-3 heads (test-time training), small targets."""
