"""`peagle regenerate` through a real vLLM server: the messages that our own engine writes."""

import json
import subprocess
import sys

import pytest
from test_matrix import ROOT, VLLM


@pytest.mark.peer
def test_a_server_of_vllm_writes_the_same(tmp_path):
    if not (VLLM / "bin/python").exists():
        pytest.skip(".venv-vllm: make test-peers installs it")
    record = tmp_path / "rows.jsonl"
    command = [sys.executable, ROOT / "scripts/peers/check_regenerate.py", "--vllm", VLLM]
    command += ["--num-conversations", "12", "--record", record]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["writer"] for row in rows] == ["peagle_jax", "vllm"]
    assert rows[0]["written"] == rows[1]["written"] == rows[0]["same"] > 6
