# make demo   train a small model with four processes, kill one, see that nothing was lost (about two minutes)
# make test   the test suite
# make lint   ruff and mypy
#
# Everything is installed into .venv by the first of them.  Needed: python3 (3.11 or newer, PYTHON=... for another), make.
# torch comes as the plain wheel of the package index.  On Linux x86-64 that one carries CUDA; a smaller one:
#   make demo TORCH_SPEC="https://download.pytorch.org/whl/cpu/<torch wheel for your Python>"

PYTHON     ?= python3
VENV       ?= .venv
TORCH_SPEC ?= torch==2.13.0
PYTEST_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/cann-train demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy lightning_cann

# Installed again only when the package's own requirements change.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH_SPEC)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
