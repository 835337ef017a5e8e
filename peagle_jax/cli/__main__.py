"""`python -m peagle_jax.cli` does what `peagle` does."""

import sys

from peagle_jax.cli import main

sys.exit(main())
