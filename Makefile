# Each target sets up a virtual environment of its own under .venv/, named after the extra it installs,
# and again only when setup.cfg or pyproject.toml has changed.
PYTHON ?= python3

.PHONY: help train train-gpu test test-all fuzz soak lint bench docs docs-links peers

help:
	@echo "make train   train on the bundled handwritten digits; results in runs/"
	@echo "make train-gpu  the same on an NVIDIA GPU; needs g++ and the driver, no CUDA toolkit"
	@echo "make test    run the tests that a commit needs"
	@echo "make test-all  run all of them"
	@echo "make fuzz    attack callables with hostile values, readers with hostile files, and break runs off, with fresh seeds"
	@echo "make soak    do the same work again and again, and see whether memory, files and threads stay level"
	@echo "make lint    run ruff and mypy"
	@echo "make docs    build the site in build/site/html; make docs-links: check its links to other sites"
	@echo "make bench   compare with scikit-learn and PyTorch on this CPU"
	@echo "make peers   compare with PyTorch and JAX on this GPU, as $(PYTHON) has them; make the tables of it"

train: .venv/plot/.installed
	@.venv/plot/bin/python examples/train_digits.py

train-gpu: .venv/gpu/.installed
	@.venv/gpu/bin/python -m mlpgpu info
	@MLPGPU_BACKEND=cuda .venv/gpu/bin/python examples/train_digits.py

# Tests that share a compiled program or a fixture are of one group, which one process runs.
PYTEST = .venv/test/bin/python -m pytest --numprocesses logical --dist loadgroup

test: .venv/test/.installed
	@$(PYTEST) -m "not thorough and not peers and not gpu"

test-all: .venv/test/.installed
	@$(PYTEST)

fuzz: .venv/test/.installed
	@.venv/test/bin/python tests/fuzz/attack_callables.py --calls 20000
	@.venv/test/bin/python tests/fuzz/foreign_files.py --files 5000
	@.venv/test/bin/python tests/fuzz/attack_files.py --files 50000
	@.venv/test/bin/python tests/fuzz/broken_runs.py --exceptions 100 --interrupts 100 --kills 300

soak: .venv/test/.installed
	@.venv/test/bin/python tests/fuzz/soak.py

lint: .venv/lint/.installed
	.venv/lint/bin/ruff check .
	.venv/lint/bin/ruff format --check .
	.venv/lint/bin/mypy

bench: .venv/peers/.installed
	@.venv/peers/bin/python benchmarks/cpu.py

docs: .venv/docs/.installed
	@.venv/docs/bin/python docs/site/build.py

docs-links: .venv/docs/.installed
	@.venv/docs/bin/python docs/site/build.py --links

peers:
	@$(PYTHON) benchmarks/peers.py --json benchmarks/results/peers.jsonl
	@$(PYTHON) benchmarks/report.py

define SET_UP
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info[:2] <= (3, 13) or sys.exit( \
	  "mlpgpu needs Python 3.10 to 3.13, got %d.%d: name another by make PYTHON=..." % sys.version_info[:2])'
	@echo "setting up $(@D) (once)"
	@$(PYTHON) -m venv --clear $(@D)
endef
INSTALL = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable

.venv/%/.installed: setup.cfg pyproject.toml
	$(SET_UP)
	@$(INSTALL) ".[$*]"
	@touch $@

# PyCUDA is built with PyPI's headers of CUDA: no extra of a package can say so.
.venv/gpu/.installed: setup.cfg pyproject.toml mlpgpu/backends/cuda/build_pycuda.py
	@command -v g++ > /dev/null || { echo "make train-gpu needs g++ (on Debian and Ubuntu: apt install g++)"; exit 1; }
	$(SET_UP)
	@$(INSTALL) ".[plot,cuda-toolkit]"
	@echo "building PyCUDA, which takes a minute or two"
	@$(@D)/bin/python -m mlpgpu.backends.cuda.build_pycuda
	@$(INSTALL) ".[plot,cuda-toolkit,cuda]"
	@touch $@
