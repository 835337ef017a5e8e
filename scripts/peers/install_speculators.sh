#!/usr/bin/env bash
# Makes an environment with speculators, the PyTorch trainer that our losses are compared with:
#     scripts/peers/install_speculators.sh ENV
set -euo pipefail
env=${1:?usage: scripts/peers/install_speculators.sh ENV}
[ -x "$env/bin/python" ] && "$env/bin/python" -c "import speculators" 2>/dev/null && { echo "speculators is in $env"; exit 0; }
python=$(command -v python3.11 || command -v python3)
"$python" -m venv "$env" || { "$(command -v python3)" -m venv "$env"; }
pip() { "$env/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install torch==2.13.0
pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
pip install "transformers<5.20" "datasets<=5.1.0" pydantic pydantic-settings safetensors click rich loguru typer numpy tqdm httpx openai aiohttp protobuf psutil jinja2
echo "speculators is in $env"
