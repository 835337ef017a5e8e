"""One file per question. `experiments.registry` lists them in the order of the report."""
