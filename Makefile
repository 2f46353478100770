# Every target does its own set-up on a machine with Python 3.11, a C++ compiler and Go. A second call is fast.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# Some machines set it, and then each of a hundred processes compiles torch's Python sources anew.
unexport PYTHONDONTWRITEBYTECODE

CRD := serving.kvasir.dev_inferenceservices.yaml

.PHONY: run test test-full test-clients lint lint-style lint-types lint-imports lint-e2e e2e bench docs setup generate

# Three processes keep two cores busy, since many tests wait; tests/side_by_side.py says how they divide the files.
PYTEST := $(BIN)/python -m pytest -n 3

run: $(INSTALLED)
	$(BIN)/python examples/quickstart.py

# What the tests need of Go and Debian (a control plane and helm, a browser) is made the first time, for some minutes, while
# packages install and linters run. A file that takes over three minutes fails the short suite; `test-full` has the slow tests too.
test: CHOSEN := -m "not slow and not clients" --file-seconds 180
test-full: CHOSEN := -m "not clients"
test test-full:
	@$(PYTHON) tests/browser/install & browser=$$!; $(PYTHON) e2e/cluster/build & build=$$!; \
	trap 'kill $$build 2>/dev/null' EXIT; \
	$(MAKE) --no-print-directory lint && wait $$browser && wait $$build && $(PYTEST) $(CHOSEN) $(PYTEST_ARGS)

# Real clients against a service of this machine; they are installed the first time, for some minutes (docs/clients.md).
test-clients: $(INSTALLED)
	$(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

lint: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint-style lint-types lint-imports lint-e2e

lint-style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(INSTALLED)
	$(BIN)/mypy

lint-imports: $(INSTALLED)
	$(BIN)/lint-imports

lint-e2e: $(INSTALLED)
	$(BIN)/python -m pytest --collect-only --quiet --quiet e2e

e2e: $(INSTALLED)
	$(BIN)/python -m pytest e2e $(PYTEST_ARGS)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/engine_cpu.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

setup: $(INSTALLED)

# What is made from the manifest's dataclasses, the metrics' registries and charts/dashboards; tests compare.
generate: $(INSTALLED)
	$(BIN)/kvasir-operator crd > crds/$(CRD)
	cp crds/$(CRD) charts/kvasir/files/crds/$(CRD)
	$(BIN)/python docs/manifest_page.py
	$(BIN)/python operator/engine_flags.py
	$(BIN)/python docs/metrics_page.py
	$(BIN)/python -m charts.dashboards
	$(BIN)/python -m charts.values_schema
	$(BIN)/python charts/values_table.py

$(INSTALLED): pyproject.toml
	@echo "--- installing Python packages into .venv (the first time: about 5 GB, torch's CUDA build included)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --editable '.[operator,router,runtime,dev]'
	@touch $@
