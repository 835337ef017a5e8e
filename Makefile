# make demo      the main job on this machine's own Python source
# make test      some 26 minutes: nearly every promise is touched; what a stranger should run
# make test-all  every test that needs no peer
# make test-peers  real vLLM, speculators, llama.cpp, the Mosaic GPU interpreter, each in its own
#                  environment
# make faults    KILLS=100 kills, and two at a time, of every command that writes
# make fuzz      CASES=20000 random inputs to everything that reads files; some hours
# make lint      style, formatting, types
# All create their environment in .venv; no other step is needed.

# the first of these that runs; 3.11 first, because torch has a small CPU build for it more often
KNOWN = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    $$p -c "$(KNOWN)" 2>/dev/null && echo $$p && break; done)
BUDGET ?= small
OUT ?= runs/demo-$(BUDGET)
KILLS ?= 100
CASES ?= 20000
PYTEST = .venv/bin/python -m pytest

.PHONY: demo test test-all test-peers test-long faults fuzz lint

demo: .venv/ready
	.venv/bin/peagle demo --out $(OUT) --budget $(BUDGET)

test: .venv/ready-dev
	$(PYTEST) -m "not slow and not long and not peer" -n 2 --dist loadfile --no-loadscope-reorder

test-all: .venv/ready-dev
	$(PYTEST) -m "not peer" -n 2 --dist loadfile
	.venv/bin/python scripts/measure/fuzz.py --cases 20000 --only tests/weights/test_fuzz.py
	.venv/bin/python scripts/measure/fuzz.py --cases 4000 --only tests/checkpoints/test_config_fuzz.py

test-peers: .venv/ready-dev
	scripts/peers/install_vllm.sh .venv-vllm
	scripts/peers/install_speculators.sh .venv-speculators
	scripts/peers/install_llama_cpp.sh .venv-llama-cpp
	$(PYTEST) -m peer
	if scripts/gpu/install_mosaic.sh .venv-mosaic; then \
	    .venv-mosaic/bin/python -m pytest -q tests/kernels/test_fp8_matmul_mosaic.py; \
	else echo "SKIPPED: the Mosaic GPU interpreter needs jax 0.11, and so Python 3.12"; fi
	if scripts/gpu/install_cuda.sh .venv-compiling compiling; then \
	    .venv-compiling/bin/python -m pytest -q tests/kernels/test_lowering.py \
	        tests/kernels/test_ahead_of_time.py; \
	else [ $$? = 2 ] && echo "SKIPPED: jax-triton 0.4 needs Python 3.12 or 3.13"; fi

faults: .venv/ready-dev
	.venv/bin/python scripts/measure/faults.py --kills $(KILLS)

fuzz: .venv/ready-dev
	.venv/bin/python scripts/measure/fuzz.py --cases $(CASES)

test-long: test-all test-peers

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

.venv/ready: pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 to 3.13 is needed and none was found;" \
	    "name one: make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -q -e .
	touch $@

# torch is the tests' oracle; 2.13.0 by its exact number, before anything that would ask for it
# more loosely
.venv/ready-dev: .venv/ready
	.venv/bin/python -m pip install --disable-pip-version-check -q torch==2.13.0
	.venv/bin/python -m pip install --disable-pip-version-check -q -e ".[dev,parity]"
	touch $@
