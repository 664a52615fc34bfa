# Everything runs in .venv, which is made on first use and again when the dependencies change. With TORCH=lowest,
# TORCH=highest or TORCH=2.12.0 it runs in another one, with that torch instead of the pinned one.
PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LM_EVAL := .venv-lm-eval
DOCS := .venv-docs

.PHONY: test test-all test-interpreter test-lm-eval test-gpu check docs check-release smoke-lowest smoke-highest dist format bench demo clean

INTERPRETED := tests/ops/contract tests/ops/triton
# A test that takes half an hour is stuck (the slowest take four minutes on two busy cores): where is shown, and it fails.
BOUNDED := -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true
PYTEST := $(BIN)/python -m pytest $(BOUNDED) --numprocesses auto --durations 10 --durations-min 2

test: $(READY)  ## the tests, and the kernels in Triton's interpreter
	$(PYTEST) -m "not slow and not gpu" --ignore tests/ops/triton
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(INTERPRETED)

test-all: $(READY)  ## the long tests, which `make test` leaves out
	$(PYTEST) -m "slow and not gpu" --ignore tests/ops/triton
	TRITON_INTERPRET=1 $(PYTEST) -m "slow and not exhaustive" $(INTERPRETED)
	$(MAKE) test-lm-eval

test-interpreter: $(READY)  ## every test of the kernels in Triton's interpreter: most of an hour
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED)

test-lm-eval: $(LM_EVAL)/.ready  ## the adapter for lm_eval, in an environment of its own: lm_eval brings 60 packages
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(LM_EVAL)/bin/python -m pytest $(BOUNDED) tests/integrations/test_lm_eval.py

test-gpu:  ## the kernels on this machine's GPU, with python3's own torch: some minutes
	$(PYTHON) scripts/test_gpu.py

check: $(READY) docs  ## lint, format, types, the docs site, the version, and sdist and wheel, tried in clean environments
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_release.py
	$(BIN)/python scripts/check_wheel.py

docs: $(DOCS)/.ready  ## the docs site in build/docs; any warning is an error
	OMP_NUM_THREADS=1 $(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo build/docs/index.html

check-release: $(READY)  ## with TAG=v0.1.0: whether tag, version, changelog and citation agree
	$(BIN)/python scripts/check_release.py '$(TAG)'

smoke-lowest smoke-highest: $(READY)  ## the installed wheel with the lowest or the newest torch, if pip finds it; REQUIRED=1: it must
	$(BIN)/python scripts/smoke_torch.py $(@:smoke-%=%) $(if $(REQUIRED),--required)

dist: $(READY)  ## sdist and wheel in dist/, checked
	rm -rf dist
	$(BIN)/python scripts/check_wheel.py --out dist

format: $(READY)  ## put the code into its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## attention on this machine's CPU, beside what torch offers
	$(BIN)/python benchmarks/attention_cpu.py

demo: $(READY)  ## four position methods trained short and tested long on this machine, in minutes: the table
	$(BIN)/trainshort compare --recipe demo

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trainshort needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(PYTHON) scripts/constraints_for.py $(TORCH),cat constraints.txt) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(READY)

# torch and the other packages of .venv are used from there. accelerate is for lm_eval's own adapter for transformers.
$(LM_EVAL)/.ready: PACKAGES := lm_eval accelerate
$(DOCS)/.ready: PACKAGES := sphinx myst-parser furo sphinx-copybutton
$(LM_EVAL)/.ready $(DOCS)/.ready: $(READY)
	$(PYTHON) -m venv --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt $(PACKAGES)
	touch $@

clean:
	rm -rf .venv .venv-torch-* $(LM_EVAL) $(DOCS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
