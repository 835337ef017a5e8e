"""Provenance where there is no git, and where the system does not count a process's cores."""

import json
import os
import subprocess
import sys

import pytest

from peagle_jax import provenance


def test_without_git_and_affinity(monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    complete = provenance.provenance("x")
    assert complete["commit"] and complete["command"] == "x"
    assert " core" in complete["device"]
    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    partial = provenance.provenance()
    assert partial["commit"] is None and partial["dirty"] is False
    assert partial["device"].endswith(", 1 core")


@pytest.mark.parametrize(
    ("command", "recorded"),
    [
        (
            "peagle bench --target /home/me/models/t --out runs/b",
            "peagle bench --target t --out runs/b",
        ),
        ("peagle bench --target=/models/t", "peagle bench --target=t"),
        ("/usr/bin/python s.py --heads /a/x,/b/c/y /z/", "python s.py --heads x,y z/"),
        ("peagle regenerate --server http://127.0.0.1:8000/v1", None),
        ("python scripts/measure/trees.py --ratio 1/2", None),
    ],
)
def test_folders_of_a_machine_are_not_recorded(command, recorded):
    assert provenance.provenance(command)["command"] == (recorded or command)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("--xla_gpu_cuda_data_dir=/usr/local/cuda", "--xla_gpu_cuda_data_dir=cuda"),
        ("OSError: '/a/b c/d.py' at 3 TB/s", "OSError: 'b c/d.py' at 3 TB/s"),
        ("see https://host/a/b", "see https://host/a/b"),
    ],
)
def test_nor_those_in_errors_and_flags(text, cut):
    assert provenance.without_folders(text) == cut


def test_rows_are_added_with_where_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["trees.py", "--record", f"{tmp_path}/new/rows.jsonl"])
    file = tmp_path / "new" / "rows.jsonl"
    provenance.append_rows(file, [{"k": 3}, {"k": 5, "device": "another"}], "scripts/x/trees.py")
    provenance.append_rows(file, [{"k": 7}], "scripts/x/trees.py")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["k"] for row in rows] == [3, 5, 7]
    assert {row["command"] for row in rows} == {"python scripts/x/trees.py --record rows.jsonl"}
    assert rows[0]["device"] == provenance.device_name() and rows[1]["device"] == "another"
    assert rows[0]["commit"] and rows[0]["time"] == rows[1]["time"]
