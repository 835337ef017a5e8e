"""Records of measurements -> JSONL, tables, pictures, and one self-contained page."""
