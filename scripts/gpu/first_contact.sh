#!/usr/bin/env bash
# The first minutes on a GPU machine on which nothing can be downloaded: Python 3.12, jax 0.11.2 with
# its CUDA plugin, triton 3.6, torch and transformers; no jax-triton, and perhaps no flax.
#     scripts/gpu/first_contact.sh carry               here: the wheels that it lacks, into $WHEELS
#     scripts/gpu/first_contact.sh run OUT [OPTION ...]  there: the GPU suite; rows go to OUT/gpu.jsonl
#     scripts/gpu/first_contact.sh keep OUT            here again: rows go to results/gpu.jsonl
# WHEELS is .wheels by default, and OUT may be an environment variable, too. Options are those of
# scripts/gpu_suite.py. Every row is written when it is known, and a further call goes on where the
# last one stopped, also on another machine, if the rows of the first were kept.
set -euo pipefail
usage="usage: scripts/gpu/first_contact.sh carry | run OUT [OPTION ...] | keep OUT"
cd "$(dirname "$0")/../.."
wheels=${WHEELS:-.wheels}
list=scripts/gpu/wheels.txt
limit=$((60 * 1024 * 1024)) # bytes that may be carried
action=${1:-}
shift || true

carry() {
    # shellcheck source=find_python.sh
    . scripts/gpu/find_python.sh
    rm -rf "$wheels"
    local platforms=()
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${name}_x86_64")
    done
    "$python" -m pip --disable-pip-version-check -q download --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp "${platforms[@]}" --require-hashes \
        -r "$list" -d "$wheels"
    local bytes
    bytes=$(cat "$wheels"/*.whl | wc -c)
    echo "$wheels: $(ls "$wheels" | wc -l) wheels, $bytes bytes"
    if [ "$bytes" -gt "$limit" ]; then
        echo "first_contact.sh: at most $limit bytes can be carried" >&2
        exit 2
    fi
}

# The folder of results: the first argument, or the environment variable OUT.
out_folder() {
    local out=${1:-${OUT:-}}
    if [ -z "$out" ]; then
        echo "$usage" >&2
        exit 2
    fi
    echo "$out"
}

run() {
    local out
    case ${1:-} in
    "" | --*) out=$(out_folder) ;;
    *) out=$(out_folder "$1") && shift ;;
    esac
    local python=${PYTHON:-python3}
    if ! ls "$wheels"/*.whl >/dev/null 2>&1; then
        echo "first_contact.sh: no wheels in $wheels; carry them: first_contact.sh carry" >&2
        exit 2
    fi
    local site
    site=$(mktemp -d)
    # a wheel is an archive: this needs no pip, and changes nothing that is installed
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$site"
    done
    mkdir -p "$out"
    if [ -s results/gpu.jsonl ] && [ ! -e "$out/gpu.jsonl" ]; then
        cp results/gpu.jsonl "$out/gpu.jsonl"
    fi
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    # 8 minutes in all: the last part may take longer than was guessed
    local code=0
    timeout 475 "$python" -W ignore scripts/gpu_suite.py --record "$out/gpu.jsonl" --minutes 7 "$@" ||
        code=$?
    rm -rf "$site"
    if [ "$code" = 124 ]; then
        echo "first_contact.sh: stopped after 8 minutes; rows are kept, the same command goes on" >&2
    fi
    return "$code"
}

keep() {
    local out
    out=$(out_folder "${1:-}")
    mkdir -p results
    cp "$out/gpu.jsonl" results/gpu.jsonl
    echo "results/gpu.jsonl: $(wc -l <results/gpu.jsonl) rows"
}

case $action in
carry | run | keep) "$action" "$@" ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
