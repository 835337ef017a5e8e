"""Provenance where there is no git, and where the system does not count a process's cores."""

import os
import subprocess

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
