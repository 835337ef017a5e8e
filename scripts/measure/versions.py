"""Does the package work with the oldest and the newest versions that pyproject.toml allows?

    .venv/bin/python scripts/measure/versions.py [--only 3.11-oldest 3.13-newest] [--skip-absent]
        [--record results/versions.jsonl]

For every Python from 3.11 to 3.13 that is here, two environments in .venv-versions/: one with the
lowest version of everything that pyproject.toml names, one with the highest. In each of them tests
run that touch every dependency: training and its checkpoints, conversion, templates, decoding,
reports; and the processor time of the import is measured, beside that of JAX alone. Exit code 1 if
a test fails, an import takes more than MOST_IMPORT_SECONDS beyond JAX's, an environment cannot be
made, or a Python is not here, unless such are to be skipped; 3 if that would be all of them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
PYTHONS = ("3.11", "3.12", "3.13")
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
MOST_IMPORT_SECONDS = 1.5
FOLDER = ROOT / ".venv-versions"
TESTS = (
    "tests/test_package.py",
    "tests/test_text.py",
    "tests/test_datasets.py",
    "tests/test_progress.py",
    "tests/chat/test_published_templates.py",
    "tests/chat/test_trained_spans.py",
    "tests/checkpoints/test_folders.py",
    "tests/checkpoints/test_gguf.py",
    "tests/decode/test_lossless.py",
    "tests/report/test_published_picture.py",
    "tests/train/test_interruption.py",
    "tests/train/test_optimizer.py",
    "tests/train/test_runs.py",
    "tests/weights/test_reading.py",
)
SHOWN = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "safetensors")


def find_python(version: str) -> str | None:
    """An interpreter of this version, on the path or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))
    for python in (shutil.which(f"python{version}"), *found):
        call = "import sys; print('%d.%d' % sys.version_info[:2])"
        if python is not None:
            said = subprocess.run([python, "-c", call], capture_output=True, text=True)
            if said.stdout.strip() == version:
                return python
    return None


def make_environment(python: str, folder: Path, resolution: str) -> None:
    """An environment with everything that the tests need but torch."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    own = folder / "bin" / "python"
    pip = [own, "-m", "pip", "install", "--disable-pip-version-check", "-q", "uv"]
    subprocess.run(pip, check=True)
    install = [own, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", own]
    subprocess.run([*install, "--resolution", resolution, "-e", f"{ROOT}[dev]"], check=True)


def versions_in(folder: Path) -> dict[str, str]:
    """Name -> version of what the environment has."""
    call = "import importlib.metadata as m, json, sys; "
    call += "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    words = [folder / "bin" / "python", "-c", call, *SHOWN]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def import_seconds(folder: Path) -> dict[str, float]:
    """Processor time of fresh interpreters, of three the shortest: with JAX alone, and with us."""
    calls = {"jax": "import jax", "peagle_jax": "from peagle_jax import generate, load_pair"}
    seconds = {}
    for name, call in calls.items():
        times = []
        for _ in range(3):
            began = os.times()
            subprocess.run([folder / "bin" / "python", "-c", call], cwd=ROOT, check=True)
            now = os.times()
            user = now.children_user - began.children_user
            times.append(user + now.children_system - began.children_system)
        seconds[name] = round(min(times), 2)
    return seconds


def judge(version: str, which: str) -> dict:
    """Makes an environment and runs the tests in it; what came out."""
    row: dict = {"python_version": version, "which": which}
    if (python := find_python(version)) is None:
        return row | {"outcome": "no such Python here"}
    folder = FOLDER / f"{version}-{which}"
    began = time.monotonic()
    try:
        make_environment(python, folder, RESOLUTIONS[which])
        versions = versions_in(folder)
    except subprocess.CalledProcessError:
        return row | {"outcome": "cannot be installed"}
    row |= {"install_seconds": round(time.monotonic() - began), "versions": versions}
    began = time.monotonic()
    words = [folder / "bin" / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    words += ["-m", "not slow and not long and not peer", *TESTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        row["import_seconds"] = seconds = import_seconds(folder)
        if seconds["peagle_jax"] - seconds["jax"] > MOST_IMPORT_SECONDS:
            return row | {"outcome": f"importing takes over {MOST_IMPORT_SECONDS} s beyond JAX"}
    else:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    counts = re.findall(r"(\d+) (passed|failed|error|errors|skipped)\b", done.stdout)
    row["tests"] = {kind: int(count) for count, kind in counts}
    row["test_seconds"] = round(time.monotonic() - began)
    return row | {"outcome": "all passed" if done.returncode == 0 else "failed"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [f"{version}-{which}" for version in PYTHONS for which in RESOLUTIONS]
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="ENVIRONMENT")
    parser.add_argument("--skip-absent", action="store_true", help="pass over absent Pythons")
    parser.add_argument("--record", type=Path, help="JSONL to append to (default: print only)")
    args = parser.parse_args()
    from peagle_jax.atomic_write import append_line
    from peagle_jax.provenance import provenance

    of_this = provenance(" ".join(["python scripts/measure/versions.py", *sys.argv[1:]]))
    table = Table("environment", *SHOWN, "import - jax's, s", "tests", "outcome")
    failed = 0
    if args.skip_absent and not any(find_python(name.partition("-")[0]) for name in args.only):
        print("versions: none of these Pythons is here, and nothing was run", file=sys.stderr)
        return 3
    for name in args.only:
        if args.skip_absent and find_python(name.partition("-")[0]) is None:
            print(f"{name}: SKIPPED, no such Python here", flush=True)
            continue
        row: dict[str, Any] = {"name": "versions"} | of_this | judge(*name.split("-"))
        failed += row["outcome"] != "all passed"
        versions, tests = row.get("versions", {}), row.get("tests", {})
        shown = ", ".join(f"{count} {kind}" for kind, count in tests.items())
        seconds = row.get("import_seconds")
        beyond = f"{seconds['peagle_jax'] - seconds['jax']:.2f}" if seconds else ""
        cells = (*(versions.get(key, "") for key in SHOWN), beyond, shown)
        table.add_row(name, *cells, row["outcome"])
        print(f"{name}: {row['outcome']}", flush=True)
        if args.record is not None:
            append_line(args.record, json.dumps(row))
    Console(width=150).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
