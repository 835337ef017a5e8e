"""The cache of compiled programs: of one kind of processor, and of one set of XLA's flags."""

import os
import subprocess
import sys

from peagle_jax.cli.libraries import cache_folder

INTEL = "processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t\t: 2000\nflags\t\t: fpu avx512f\n"
# 1 is lost beside 1e8 in float32, unless the sum is rearranged
SUM = """
import jax, numpy as np
from peagle_jax.cli.libraries import configure_libraries
configure_libraries()
x = np.full(64, 1.0, np.float32)
print(float(jax.jit(lambda x, y: ((x + y) - y).sum())(x, np.float32(1e8))))
"""


def test_processors_of_one_kind_share_programs(tmp_path):
    """Whatever their number and clock. Another kind has its own, and so has another system."""
    folders = []
    for i, text in enumerate(
        (INTEL, INTEL.replace("2000", "3100") * 2, INTEL.replace(" avx512f", ""), None)
    ):
        file = tmp_path / str(i)
        if text is not None:
            file.write_text(text)
        folders.append(cache_folder(file))
    first, same, other, unknown = folders
    assert first == same and len({first, other, unknown}) == 3
    assert all(folder.parent == first.parent for folder in folders)


def test_the_default_folder_is_of_this_processor(tmp_path):
    call = "import jax; from peagle_jax.cli.libraries import configure_libraries, cache_folder; "
    call += "configure_libraries(); print(jax.config.jax_compilation_cache_dir, cache_folder())"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", call],
        env=environment | {"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    used, meant = done.stdout.split()
    assert used == meant and used.startswith(str(tmp_path / ".cache" / "peagle_jax"))


def test_programs_of_other_flags_are_not_taken(tmp_path):
    """With one cache, every set of flags runs what it has compiled itself."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }

    def result(flags: str) -> str:
        words, given = [sys.executable, "-c", SUM], environment | {"XLA_FLAGS": flags}
        return subprocess.run(words, env=given, capture_output=True, text=True, check=True).stdout

    rearranging = "--xla_cpu_enable_fast_math=true"
    assert result(rearranging) == "64.0\n"
    num_programs = len(list(tmp_path.iterdir()))
    assert num_programs > 0
    assert result("") == "0.0\n"
    assert len(list(tmp_path.iterdir())) > num_programs
    assert result(rearranging) == "64.0\n"
