"""One file per question. Run from a checkout."""
