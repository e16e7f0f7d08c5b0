# The one list of commands, used by people and by .ci/run. Every target sets up .venv when it is missing or stale.
PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 5

.PHONY: install quickstart test test-slow test-browser lint format bench results clean

install: .venv/ready             ## .venv with the project in it

quickstart: .venv/ready          ## train small models for about five minutes (MINUTES=10: ten), show what their memory does
	$(BIN)/python examples/quickstart.py --minutes $(MINUTES)

test: .venv/ready                ## the tests
	$(BIN)/python -m pytest -n auto
	$(MAKE) test-browser

test-slow: .venv/ready           ## the long tests too
	$(BIN)/python -m pytest -n auto -m "not browser" --durations=15

test-browser: .venv/ready        ## the inspector in a real browser; needs chromium (Debian: apt-get install chromium)
	$(BIN)/python -m pytest tests/browser -m browser -rs

lint: .venv/ready                ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready              ## put the code into style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/peers               ## the memory on this CPU, beside titans-pytorch
	$(BIN)/python benchmarks/cpu_memory.py

results: .venv/ready             ## docs/results.md and its pictures from the stored runs
	$(BIN)/python benchmarks/results.py

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/peers: .venv/ready constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt titans-pytorch==0.5.5
	touch $@

clean:
	rm -rf .venv dist build out
