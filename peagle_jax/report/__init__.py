"""Result rows -> JSONL, tables, statements, plots, and a page that needs no other file."""
