#!/usr/bin/env bash
# Makes an environment in which Mosaic GPU kernels are interpreted: jax 0.11, and so Python 3.12
# or later.
#     scripts/gpu/install_mosaic.sh ENV
set -euo pipefail
env=${1:?usage: scripts/gpu/install_mosaic.sh ENV}
if [ -x "$env/bin/python" ] && "$env/bin/python" -c "import jax, pytest" 2>/dev/null; then
    echo "Mosaic GPU's interpreter is in $env"
    exit 0
fi
. "$(dirname "$0")/find_python.sh"
"$python" -m venv "$env"
"$env/bin/python" -m pip --disable-pip-version-check -q install jax==0.11.2 flax==0.12.12 \
    jaxtyping beartype pytest hypothesis absl-py ml_dtypes numpy
echo "Mosaic GPU's interpreter is in $env"
