# Everything a newcomer runs. Needs Python 3.11 or newer, pip and make; the rest goes into .venv and a cache folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
DOCS_READY := $(VENV)-docs/.ready
RELEASE_READY := $(VENV)-release/.ready
COMPILED := $(VENV)/.compiled
ARGS ?=
# More than cores, since tests wait; six leave two cores idle for 15 % of the time. With breadth, which computes more,
# seven took longer than five.
WORKERS ?= $(if $(KMQ_TEST_ALL),5,7)
# Else the hundreds of processes that tests start, and each worker, would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Of pip's lines, those that say what takes time; errors it writes elsewhere.
PROGRESS := awk '/Downloading .* MB/ { print; fflush() } /^Installing/ { print "  Installing"; fflush() }'

.PHONY: help demo test test-all test-quick test-room test-failed test-unit test-docs lint format bench bench-table chaos test-brokers test-pythons mutants fuzz model metrics-tables diagrams docs release-check lock clean
.DEFAULT_GOAL := help
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(DEMO_READY): requirements-dev.lock pyproject.toml
	@echo "Setting up $(VENV) with what kmqpy and its servers need (once; 200 MB) ..."
	@$(PYTHON) -c 'import sys; sys.exit("kmqpy needs Python 3.11 or newer; run: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar off --require-hashes -r requirements-dev.lock | $(PROGRESS)
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(READY): $(DEMO_READY) requirements.lock
	@echo "Adding to $(VENV) what tests, benchmarks and linters need (once; 1.3 GB, a minute or a few) ..."
	@$(BIN)/python -m pip install --progress-bar off --require-hashes -r requirements.lock | $(PROGRESS)
	@touch $@

$(DOCS_READY): requirements-docs.lock pyproject.toml
	@echo "Setting up $(VENV)-docs (once) ..."
	@$(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip install --progress-bar off --require-hashes -r requirements-docs.lock | $(PROGRESS)
	@$(VENV)-docs/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(RELEASE_READY): requirements-release.lock pyproject.toml
	@echo "Setting up $(VENV)-release (once) ..."
	@$(PYTHON) -m venv $(VENV)-release
	@$(VENV)-release/bin/python -m pip install --progress-bar off --require-hashes -r requirements-release.lock | $(PROGRESS)
	@touch $@

$(COMPILED): $(READY)
	@$(BIN)/python -m pytest --collect-only -q > /dev/null || true # else each worker would compile all tests
	@touch $@

demo: $(DEMO_READY) ## 20,000 messages, failing consumers, a killed tracker: nothing lost
	@$(BIN)/kmq demo $(ARGS)

test: $(COMPILED) ## every promise once, on real servers
	@# Where pytest ends with more than 1, tests were not run: `make test-failed` must then find nothing that it could pass.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS) || { code=$$?; \
		[ $$code = 1 ] || rm -f .pytest_cache/v/cache/lastfailed; exit $$code; }

test-all: ## make test, and breadth: more servers, kills of Spark, chaos, wheels with each extra, every block of every page
	@KMQ_TEST_ALL=1 KMQ_TEST_SLOW_PAGES=1 $(MAKE) test

# Redelivered without an acknowledgement, then acknowledged; dead-lettered as it kills its consumers.
END_TO_END := tests/integration/test_tracker.py::test_a_message_comes_again_when_its_lease_ends_and_not_when_acknowledged \
	tests/integration/test_client.py::test_f15_a_message_that_kills_its_consumer_ends_as_dead_letter

test-quick: $(READY) ## unit tests, and a queue end to end on a real Kafka: less than a minute
	$(BIN)/python -m pytest -n 3 --dist worksteal $(END_TO_END) tests/unit $(ARGS)

test-failed: $(READY) ## the tests that failed in the last run, one after the other
	KMQ_TEST_ALL=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -rpfE $(ARGS)

test-room: $(READY) ## the tests of one room, about a minute: ROOM=kmqpy/storages/sql
	@$(BIN)/python -m tests.rooms $(ROOM) $(ARGS)

test-unit: $(READY) ## the tests that need no server
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-docs: $(READY) ## the code blocks of docs/spark.md, which take a minute or two
	KMQ_TEST_SLOW_PAGES=1 $(BIN)/python -m pytest tests/docs -k "blocks_of_a_page and spark" $(ARGS)

test-brokers: $(READY) ## the core suite on each Kafka that docs/versions.md names, 3 minutes each; ARGS="2.8.2" for one
	$(BIN)/python -m tests.brokers $(ARGS)

test-pythons: $(READY) ## the core suite on each Python that docs/versions.md names, 15 minutes each; ARGS="3.14" for one
	@$(BIN)/python -m tests.pythons $(ARGS)

lint: $(READY) ## ruff, mypy --strict, import-linter, zizmor; actionlint where Go is
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/zizmor --offline --quiet .github
	@if go run $(ACTIONLINT) -version > /dev/null 2>&1; then go run $(ACTIONLINT); else echo "actionlint is left out: there is no Go, or it can't fetch it"; fi

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_READY) ## the documentation as a web site in site/, with every link checked
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict $(ARGS)

bench: $(READY) ## measure every part beside its peers; ARGS="--quick" for less than 3 minutes
	@$(BIN)/python -m benchmarks run $(ARGS)

bench-table: $(READY) ## put the figures of benchmarks/results*.json into README.md and docs/
	@$(BIN)/python -m benchmarks table

chaos: $(READY) ## kill, pause, cut off everything under load; ARGS="--quick" for less than 4 minutes
	@$(BIN)/python -m tests.chaos run $(ARGS)

mutants: $(READY) ## break kmqpy in one line, over and over: do the tests notice? ARGS="worker", or all
	@$(BIN)/python -m tests.mutants $(ARGS)

fuzz: $(READY) ## hostile input, guided by coverage; ARGS="marker --seconds 60", or all
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { echo "Installing atheris (once) ..."; $(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[fuzz]"; }
	@$(BIN)/python -m tests.fuzz $(ARGS)

model: $(READY) ## check the protocol with TLC, see spec/README.md; ARGS="--full" for large bounds
	@$(BIN)/python -m spec $(ARGS)

metrics-tables: $(READY) ## put the metrics' help texts into docs/metrics.md
	@$(BIN)/python -m tests.docs.metrics_tables

diagrams: ## draw docs/*.dot (needs npm)
	for file in docs/*.dot; do npx --yes @hpcc-js/wasm-graphviz-cli@1.11.2 -K dot -T svg $$file > $${file%.dot}.svg; done

release-check: $(RELEASE_READY) ## build it twice, install it with each extra; ARGS="--tag v0.1.0" before that tag is pushed
	@$(VENV)-release/bin/python tests/packaging/release.py $(ARGS)

COMPILE := $(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" pyproject.toml

lock: ## pin the newest versions that pyproject.toml allows, with hashes
	@$(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install --quiet uv
	$(COMPILE) --upgrade --extra bench --extra test --extra lint -o requirements.lock
	$(COMPILE) --constraint requirements.lock --extra build --extra dev -o requirements-dev.lock
	$(COMPILE) --upgrade --extra docs -o requirements-docs.lock
	$(COMPILE) --upgrade --extra release -o requirements-release.lock
	@rm -rf $(VENV)-lock

clean: ## remove what the other targets made here
	rm -rf $(VENV) $(VENV)-* site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
