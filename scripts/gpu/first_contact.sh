#!/usr/bin/env bash
# The first minutes on a GPU machine on which nothing can be downloaded: Python 3.12, jax 0.11.2 with
# its CUDA plugin, triton 3.6, torch and transformers; no jax-triton, and perhaps no flax.
#     scripts/gpu/first_contact.sh carry               here: the wheels that it lacks, into $WHEELS
#     scripts/gpu/first_contact.sh run OUT [OPTION ...]  there: the GPU suite; rows go to OUT/gpu.jsonl
#     scripts/gpu/first_contact.sh keep OUT            here again: new rows go to results/gpu.jsonl
# WHEELS is .wheels by default, and OUT may be an environment variable, too; KEPT is another file
# than results/gpu.jsonl. Options are those of scripts/gpu_suite.py. Every row is written when it is
# known, and a further call goes on where the last one stopped, also on another machine, if the rows
# of the first were kept.
set -euo pipefail
usage="usage: scripts/gpu/first_contact.sh carry | run OUT [OPTION ...] | keep OUT"
cd "$(dirname "$0")/../.."
wheels=${WHEELS:-.wheels}
kept=${KEPT:-results/gpu.jsonl}
list=scripts/gpu/wheels.txt
limit=$((60 * 1024 * 1024)) # bytes that may be carried
action=${1:-}
shift || true

carry() {
    # shellcheck source=find_python.sh
    . scripts/gpu/find_python.sh
    local fresh
    fresh=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$fresh'" EXIT
    local platforms=()
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${name}_x86_64")
    done
    "$python" -m pip --disable-pip-version-check -q download --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp "${platforms[@]}" --require-hashes \
        -r "$list" -d "$fresh"
    local bytes
    bytes=$(cat "$fresh"/*.whl | wc -c)
    if [ "$bytes" -gt "$limit" ]; then
        echo "first_contact.sh: at most $limit bytes can be carried, and these are $bytes" >&2
        exit 2
    fi
    # only wheels are replaced: the folder is the user's, and may hold something else
    mkdir -p "$wheels"
    rm -f "$wheels"/*.whl
    mv "$fresh"/*.whl "$wheels"
    echo "$wheels: $(find "$wheels" -name '*.whl' | wc -l) wheels, $bytes bytes"
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
    if [ -s "$kept" ] && [ ! -e "$out/gpu.jsonl" ]; then
        cp "$kept" "$out/gpu.jsonl"
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

# Adds the rows that results/gpu.jsonl does not have yet; none of its own is lost.
keep() {
    local out
    out=$(out_folder "${1:-}")
    if [ ! -s "$out/gpu.jsonl" ]; then
        echo "first_contact.sh: no rows in $out/gpu.jsonl; name the folder that run wrote" >&2
        exit 2
    fi
    if grep -q '"suite": *"tiny"' "$out/gpu.jsonl"; then
        echo "first_contact.sh: $out/gpu.jsonl has rows of --tiny, which say nothing of a GPU;" \
            "run without it into another folder" >&2
        exit 2
    fi
    mkdir -p "$(dirname "$kept")"
    touch "$kept"
    local before fresh
    before=$(wc -l <"$kept")
    fresh=$(mktemp "$kept.XXXXXX")
    # a last line without an end was cut short by a kill
    local cut=()
    [ -z "$(tail -c 1 "$out/gpu.jsonl")" ] || cut=('$d')
    sed "${cut[@]:-}" "$out/gpu.jsonl" | awk '!seen[$0]++' "$kept" - >"$fresh"
    chmod 644 "$fresh"
    mv "$fresh" "$kept"
    echo "$kept: $(wc -l <"$kept") rows, $(($(wc -l <"$kept") - before)) of them new"
}

case $action in
carry | run | keep) "$action" "$@" ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
