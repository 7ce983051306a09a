# Two commands: `make demo` and `make test`. Everything else is for those who work on rayps.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Test processes that run at once: two more than there are cores, since tests wait for deadlines and for processes.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 2 : 8)))
SOAK ?= 8h
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder

.PHONY: demo stop test quick rooms simulate soak kills durations docs lint fmt clean

demo: $(VENV)/ready  ## train the digits through the job service, and leave the dashboard running
	$(BIN)/python examples/demo.py

stop: $(VENV)/ready  ## end what `make demo` left running
	$(BIN)/python examples/demo.py --stop

test: $(VENV)/ready lint  ## all tests; those whose program is missing say so
	$(PYTEST) $(ARGS)
	@if command -v npm >/dev/null; then cd dashboards && { test -d node_modules || npm ci --silent; } && npm test --silent; \
	else echo "the dashboard's unit tests were left out: npm is not on this machine"; fi

quick: $(VENV)/ready lint  ## the tests without Ray, kills, the browser and benchmarks
	$(PYTEST) -m "not ray and not chaos and not browser and not bench" $(ARGS)

rooms: $(VENV)/ready  ## the tree without each room that it can do without: imports, ruff, mypy, and the quick tests of the rest
	for room in loggers tables chaos; do JOBS=$(JOBS) $(BIN)/python scripts/without.py $$room --quick $(ARGS) || exit 1; done

simulate: $(VENV)/ready  ## 5,000 seeds of the deterministic simulation; ARGS="--seeds 100000" for more, "--seed 17 --trace" for one
	$(BIN)/python scripts/simulate.py $(ARGS)

soak: $(VENV)/ready  ## the whole grids of which `make test` runs a cover; then four jobs at a time under random faults: SOAK=8h
	$(PYTEST) -m soak
	$(BIN)/python -m rayps.cli chaos --soak $(SOAK) --out build/soak $(ARGS)

kills: $(VENV)/ready  ## many random kills of the service and of Ray's processes, with figures; about an hour on two cores
	$(BIN)/python scripts/kills.py $(ARGS)

durations: $(VENV)/ready  ## all tests, and the table of durations by which they are divided among processes
	$(PYTEST) --store-durations $(ARGS)

docs: $(VENV)/ready  ## the documentation site, in build/docs; a broken link is an error
	$(BIN)/python -m sphinx -q -W --keep-going -E -a -b html docs build/docs
	@echo "open build/docs/index.html"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

fmt: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ./client --editable ".[privacy]" --editable ./chaos --group dev
	touch $@

clean:
	rm -rf $(VENV) .rayps build dist dashboards/dist dashboards/node_modules
