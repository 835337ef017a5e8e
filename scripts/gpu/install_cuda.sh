#!/usr/bin/env bash
# Makes an environment for NVIDIA GPUs, which also compiles for them where there is none:
# CUDA plugin, jax-triton, 6 GB.
#     scripts/gpu/install_cuda.sh ENV
set -euo pipefail
env=${1:?usage: scripts/gpu/install_cuda.sh ENV}
cd "$(dirname "$0")/../.."
[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
if ! JAX_PLATFORMS=cpu "$env/bin/python" -c "import jax_triton, peagle_jax, pytest" 2>/dev/null; then
    "$env/bin/python" -m pip --disable-pip-version-check -q install -e ".[cuda,kernels]" \
        pytest pytest-xdist beartype
fi
echo "compiles for CUDA: $env"
