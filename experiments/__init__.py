"""Experiments on draft heads: questions, and the machinery that runs and reports them."""
