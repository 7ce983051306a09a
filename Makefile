# Two commands: `make demo` and `make test`. Everything else is for those who work on rayps.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo stop test lint fmt clean

demo: $(VENV)/ready  ## train the digits through the job service, and leave the dashboard running
	$(BIN)/python examples/demo.py

stop: $(VENV)/ready  ## end what `make demo` left running
	$(BIN)/python examples/demo.py --stop

test: $(VENV)/ready lint  ## all tests; those whose program is missing say so
	$(BIN)/python -m pytest $(ARGS)
	@if command -v npm >/dev/null; then cd dashboards && { test -d node_modules || npm ci --silent; } && npm test --silent; \
	else echo "the dashboard's unit tests were left out: npm is not on this machine"; fi

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

fmt: $(VENV)/ready
	$(BIN)/ruff check --fix .

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

clean:
	rm -rf $(VENV) .rayps build dist dashboards/dist dashboards/node_modules
