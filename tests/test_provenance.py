"""Provenance where there is no git, and where the system does not count a process's cores."""

import os
import subprocess

from peagle_jax import provenance


def test_without_git_and_affinity(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    here = provenance.provenance("x")
    assert here["commit"] and here["command"] == "x" and " core" in here["device"]
    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    there = provenance.provenance()
    assert (
        there["commit"] is None and there["dirty"] is False and there["device"].endswith(", 1 core")
    )
