#!/usr/bin/env bash
# Makes an environment with a real llama.cpp that runs on the CPU, for check_llama_cpp.py:
#     scripts/peers/install_llama_cpp.sh ENV
# xllamacpp's wheel holds llama.cpp's server, which was compiled for any x86-64 or ARM processor.
set -euo pipefail
env=${1:?usage: scripts/peers/install_llama_cpp.sh ENV}
version=${XLLAMACPP_VERSION:-2026.10.11549}
if [ -x "$env/bin/python" ] && "$env/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('xllamacpp') != '$version')" 2>/dev/null; then
    echo "xllamacpp $version is in $env"
    exit 0
fi
python=$(command -v python3.11 || command -v python3)
"$python" -m venv "$env" || { "$(command -v python3)" -m venv "$env"; }
"$env/bin/python" -m pip --disable-pip-version-check -q install "xllamacpp==$version"
echo "xllamacpp $version is in $env"
