"""Experiments on draft heads: questions, and the machinery that runs and reports them."""

import os

# transformers advises to install PyTorch, which nothing here needs
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
