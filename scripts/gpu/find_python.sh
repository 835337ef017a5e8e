# To be sourced: sets `python` to an interpreter of 3.12 or 3.13, which jax 0.11 needs; otherwise
# says that there is none, and ends with exit code 2. PYTHON names one.
pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
for python in ${PYTHON:-} python3.12 python3.13 "$pyenv_root"/versions/3.1[23]*/bin/python; do
    "$python" -c "import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))" \
        2>/dev/null && break
    python=
done
if [ -z "$python" ]; then
    echo "$(basename "$0"): Python 3.12 or 3.13 is needed and none was found" >&2
    exit 2
fi
