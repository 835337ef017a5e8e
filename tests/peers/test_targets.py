"""Real vLLM on a tiny target of every family, with a head trained on it.

These are all that scripts/peers/check_targets.py has.
"""

import subprocess
import sys

import pytest
from test_matrix import ROOT, VLLM


@pytest.mark.peer
def test_vllm_agrees_on_every_family(tmp_path):
    if not (VLLM / "bin/python").exists():
        pytest.skip(".venv-vllm: make test-peers installs it")
    command = [
        sys.executable,
        ROOT / "scripts/peers/check_targets.py",
        "--vllm",
        VLLM,
        "--out",
        tmp_path / "targets",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
