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
pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
for python in python3.12 python3.13 "$pyenv_root"/versions/3.1[23]*/bin/python; do
    "$python" -c "import sys; sys.exit(sys.version_info[:2] < (3, 12))" 2>/dev/null && break
    python=
done
if [ -z "$python" ]; then
    echo "install_mosaic.sh: Python 3.12 or 3.13 is needed and none was found" >&2
    exit 2
fi
"$python" -m venv "$env"
"$env/bin/python" -m pip --disable-pip-version-check -q install jax==0.11.2 flax==0.12.12 \
    jaxtyping beartype pytest hypothesis absl-py ml_dtypes numpy
echo "Mosaic GPU's interpreter is in $env"
