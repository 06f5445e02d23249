# make run     serve http://127.0.0.1:8080 on an embedded PostgreSQL (TALLY_DATA_DIR, TALLY_PORT)
# make pipeline  what `tally pipeline` needs besides; it calls this itself when it is first used
# make test    the whole test suite            make lint     style, types, import rules
# make test-fast  ledger, WAL and signing: a minute, no Spark, no Debian packages, no C compiler
# make docs    the documentation as a site in build/site
# make hooks   git runs `make lint` before each push
# make bench   benchmarks (ROWS="a b" for some) make torture  long fault runs (SEED=n replays one)
# make sanitize  the modules in C under address and undefined-behaviour sanitizers: their tests, and a fuzzer
# make lock    write the lock files again from pyproject.toml
# make cases   write docs/formats/cases again, from the tables in tests/cases
# make facts   write the tables of docs, the scripts and the C that follow from the declarations in ledger/facts

# The system's Python where it can make an environment and compile for it, else the first on PATH: distributions build
# theirs by a profile, pyenv by default does not, and then every line of Python takes 1.4 times as long.
PYTHON ?= $(or $(shell /usr/bin/python3 -c $(SERVES) 2>/dev/null && echo /usr/bin/python3),python3)
SERVES = 'import ensurepip, os, sys, sysconfig as built; \
  sys.exit(sys.version_info < (3, 11) or not os.path.exists(built.get_path("include") + "/Python.h"))'
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SELF := $(PIP) install --no-deps --no-build-isolation --editable .

# Stamps: a second make finds everything in place and installs nothing.
RUNTIME := $(VENV)/.installed-runtime
PIPELINE := $(VENV)/.installed-pipeline
DEV := $(VENV)/.installed-dev
CLASSES := $(VENV)/.made-classes
FAST := $(VENV)/.installed-fast
NATIVE := $(VENV)/.built-native

.DEFAULT_GOAL := run
.PHONY: run pipeline test test-fast lint docs hooks bench torture sanitize lock facts cases debian-tools

# Hundreds of processes that tests start read what the first of them has compiled, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=

# exec: the service takes the place of the shell, so SIGTERM and SIGINT reach it and nothing stands between.
run: $(RUNTIME)
	@exec $(BIN)/tally dev

pipeline: $(CLASSES)

# What is in C is tested, too: where the environment is older than the compiler, or than the sources, it is built now.
$(NATIVE): $(RUNTIME) $(wildcard app/runtime/state/*.c ledger/*.[ch] wal/*.[ch]) | debian-tools
	@[ ! -e $@ ] && $(BIN)/python -c 'import app.runtime.state._native, ledger._native, wal._native' 2>/dev/null || $(SELF)
	@touch $@

# Six at once on two cores: much of a test is waiting for a disk, a process or a deadline. Files go out as
# tests/conftest.py says, so that none of the long ones is left to run alone at the end.
test: debian-tools $(NATIVE) $(DEV) $(CLASSES)
	$(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder

# What needs neither Spark nor debian-tools. Any one of them: .venv/bin/python -m pytest tests/ledger/test_hlc.py
test-fast: $(FAST)
	$(BIN)/python -m pytest -n 2 -m "not debian_tools" tests/ledger tests/signing tests/wal

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

facts: $(RUNTIME)
	$(BIN)/python -m lab.facts

cases: $(DEV)
	$(BIN)/python -m tests.cases

# The documentation as a site, in build/site.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

hooks:
	@printf '#!/bin/sh\nexec make lint\n' >"$$(git rev-parse --git-path hooks)/pre-push"
	@chmod +x "$$(git rev-parse --git-path hooks)/pre-push"

# etcd is what single requests are compared with.
bench: $(DEV) $(CLASSES)
	@command -v etcd >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends etcd-server >/dev/null; } || \
	  { echo "The benchmarks need etcd; on Debian: sudo apt-get install etcd-server" >&2; exit 1; }
	$(BIN)/python -m benchmarks $(ROWS)

# The tests marked torture, with many rounds instead of a few, every property with many examples, and exhaustive tests
# with all of their cases; SEED= replays one round.
torture: debian-tools $(NATIVE) $(DEV) $(CLASSES)
	TORTURE_ROUNDS=$(or $(ROUNDS),200) SEED=$(SEED) $(BIN)/python -m pytest -m torture --timeout=0
	$(if $(SEED),,TEST_EXAMPLES=2000 $(BIN)/python -m pytest -m "hypothesis or exhaustive" --timeout=0)
	$(if $(SEED),,$(BIN)/python -m tests.fuzz.sanitize --seconds $(or $(SECONDS),300) --examples 2000)

# Each parser is fed damaged input for SECONDS; SEED= draws other inputs.
sanitize: debian-tools $(NATIVE) $(DEV) $(CLASSES)
	$(BIN)/python -m tests.fuzz.sanitize --seconds $(or $(SECONDS),30) --seed $(or $(SEED),1)

# The fault injection tests make single system calls fail with strace; SoftHSM is an HSM without hardware; Chromium looks
# at pages, without a window, which takes half the processor time; Debian's PostgreSQL is the oldest that the ledger is
# tested on, and gets no cluster of its own; Spin searches the model of replication, which it writes in C, and tcc compiles
# at once; what is in C here is compiled, too; systemd-analyze judges units; leases are kept in a real etcd, too;
# PgBouncer is a pooler before PostgreSQL; rsyslog receives messages over TLS.
DEBIAN := strace softhsm2 chromium-headless-shell postgresql etcd-server spin tcc gcc libc6-dev python3-dev systemd pgbouncer \
  rsyslog rsyslog-openssl
HEADER = $$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
CLUSTERS := /etc/postgresql-common/createcluster.d
debian-tools:
	@command -v strace >/dev/null && command -v softhsm2-util >/dev/null && \
	  command -v chromium-headless-shell >/dev/null && command -v etcd >/dev/null && command -v spin >/dev/null && \
	  command -v tcc >/dev/null && command -v gcc >/dev/null && command -v systemd-analyze >/dev/null && \
	  [ -x /usr/sbin/pgbouncer ] && [ -x /usr/sbin/rsyslogd ] && ls /usr/lib/*/rsyslog/lmnsd_ossl.so >/dev/null 2>&1 && \
	  [ -f "$(HEADER)" ] && \
	  ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  mkdir -p $(CLUSTERS) && echo "create_main_cluster = false" >$(CLUSTERS)/tallystick.conf && \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(DEBIAN) >/dev/null; \
	  done=$$?; rm -f $(CLUSTERS)/tallystick.conf; exit $$done; \
	else \
	  echo "The tests need $(DEBIAN); install them first, on Debian: sudo apt-get install $(DEBIAN)" >&2; \
	  exit 1; \
	fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements.lock pyproject.toml hatch_build.py app/runtime/state/_native.c ledger/_entry_form.h ledger/_native.c ledger/_native.h wal/_native.c wal/_shipping.h wal/_stream.h | $(BIN)/python
	@echo "Installing what the service needs into $(VENV) ..."
	@$(PIP) install --require-hashes -r requirements.lock
	@$(SELF)
	@touch $@

# Each larger lock holds the smaller one whole, in the same versions. PySpark is built here, with the setuptools that
# the smallest lock names.
$(PIPELINE): requirements-pipeline.lock | $(RUNTIME)
	@echo "Installing what the pipeline needs into $(VENV), about a minute ..."
	@$(PIP) install --require-hashes --no-build-isolation -r requirements-pipeline.lock
	@touch $@

# Spark starts in half the time from the classes that Java keeps here; how they are kept is a matter of that module.
$(CLASSES): pipeline/class_archive.py $(PIPELINE)
	@$(BIN)/python -m pipeline.class_archive
	@touch $@

$(DEV): requirements-dev.lock | $(PIPELINE)
	@echo "Installing what tests, lint and benchmarks need into $(VENV) ..."
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@touch $@

$(FAST): requirements-fast.lock | $(RUNTIME)
	@echo "Installing what the fast tests need into $(VENV) ..."
	@$(PIP) install --require-hashes -r requirements-fast.lock
	@touch $@

COMPILE = $(BIN)/uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate --no-emit-index-url --no-emit-find-links $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))

lock: | $(BIN)/python
	$(PIP) install uv
	$(COMPILE) --group build --output-file requirements.lock
	$(COMPILE) --group build --extra archive --constraint requirements.lock --output-file requirements-archive.lock
	$(COMPILE) --group build --extra pipeline --constraint requirements-archive.lock \
	  --output-file requirements-pipeline.lock
	$(COMPILE) --group build --extra pipeline --group test --group lint --group bench --group docs \
	  --constraint requirements-pipeline.lock \
	  --output-file requirements-dev.lock
	$(COMPILE) --group build --group fast --constraint requirements-dev.lock --output-file requirements-fast.lock
