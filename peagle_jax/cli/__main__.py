import sys

from peagle_jax.cli import main

sys.exit(main())
