#!/usr/bin/env bash
# Makes an environment for NVIDIA GPUs, which also compiles for them where there is none. It needs
# Python 3.12 or 3.13.
#     scripts/gpu/install_cuda.sh ENV [KIND]
#   newest        what `pip install -e ".[cuda,kernels]"` brings: triton 3.9; 6 GB
#   gpu-machine   triton 3.6, as on a machine that has it for its torch; 6 GB
#   compiling     as newest, but of CUDA only JAX's plugin and the assembler: programs are compiled,
#                 and no GPU could run them; 2.5 GB
#   compiling-gpu-machine  the same with the versions of gpu-machine
# An environment that has all of this is left as it is; one of an older Python is made anew.
set -euo pipefail
kinds="newest | gpu-machine | compiling | compiling-gpu-machine"
usage="usage: scripts/gpu/install_cuda.sh ENV [$kinds]"
env=${1:?$usage}
kind=${2:-newest}
cd "$(dirname "$0")/../.."
case $kind in
newest | gpu-machine | compiling | compiling-gpu-machine) ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
is_new_enough="import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))"
if ! "$env/bin/python" -c "$is_new_enough" 2>/dev/null; then
    . scripts/gpu/find_python.sh
    if [ -e "$env" ]; then
        echo "$env is of another Python, and is made anew with $("$python" --version)"
    fi
    "$python" -m venv --clear "$env"
fi
# what decides what is installed, and where this checkout is
made_from="$kind $PWD $(cat pyproject.toml scripts/gpu/install_cuda.sh | sha256sum)"
stamp=$env/made-from
install() { "$env/bin/python" -m pip --disable-pip-version-check -q install "$@"; }
version() { "$env/bin/python" -c "from importlib.metadata import version; print(version('$1'))"; }
describe() {
    local versions
    versions="jax $(version jax), jax-triton $(version jax-triton), triton $(version triton)"
    echo "for CUDA: $env ($kind: $versions)"
}
if [ "$(cat "$stamp" 2>/dev/null)" = "$made_from" ]; then
    describe
    exit 0
fi
rm -f "$stamp"
tests=(pytest pytest-xdist beartype)
# pip would refuse the pair: jax-triton asks for triton 3.7 (see `import_jax_triton`)
install_of_gpu_machine() {
    install -e . "$1" triton==3.6.0 absl-py "${tests[@]}"
    install --no-deps jax-triton==0.4.1
}
case $kind in
newest) install -e ".[cuda,kernels]" "${tests[@]}" ;;
gpu-machine) install_of_gpu_machine "jax[cuda13]==0.11.2" ;;
compiling) install -e ".[kernels]" "${tests[@]}" ;;
compiling-gpu-machine) install_of_gpu_machine jax==0.11.2 ;;
esac
case $kind in
compiling*)
    install --no-deps "jax-cuda13-plugin==$(version jaxlib)" "jax-cuda13-pjrt==$(version jaxlib)" \
        "nvidia-cuda-nvcc>=13,<14" "nvidia-nvvm>=13,<14"
    ;;
esac
echo "$made_from" >"$stamp"
describe
