# Every target does its own set-up on a machine with Python 3.11, a C++ compiler and Go. A second call is fast.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

CRD := serving.kvasir.dev_inferenceservices.yaml

.PHONY: run test lint e2e bench setup generate

run: $(INSTALLED)
	$(BIN)/python examples/quickstart.py

# The control plane for the tests (Go, 5 to 6 minutes the first time) is compiled, and a browser installed, while packages
# install and linters run.
test:
	@$(PYTHON) tests/browser/install & browser=$$!; $(PYTHON) e2e/cluster/build & build=$$!; trap 'kill $$build 2>/dev/null' EXIT; \
	$(MAKE) --no-print-directory lint && wait $$browser && wait $$build && $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --collect-only --quiet --quiet e2e

e2e: $(INSTALLED)
	$(BIN)/python -m pytest e2e $(PYTEST_ARGS)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/engine_cpu.py

setup: $(INSTALLED)

# What is made from the manifest's dataclasses, the metrics' registries and charts/dashboards; tests compare.
generate: $(INSTALLED)
	$(BIN)/kvasir-operator crd > crds/$(CRD)
	cp crds/$(CRD) charts/kvasir/files/crds/$(CRD)
	$(BIN)/kvasir-operator crd --reference > docs/reference/inferenceservice.md
	$(BIN)/python docs/metrics_page.py
	$(BIN)/python -m charts.dashboards

$(INSTALLED): pyproject.toml
	@echo "--- installing Python packages into .venv (the first time: about 5 GB, torch's CUDA build included)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --editable '.[operator,router,runtime,dev]'
	@touch $@
