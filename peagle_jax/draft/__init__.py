"""Draft heads: P-EAGLE and EAGLE-3 are one module, run in two ways."""
