# Everything sets itself up: each target that needs an environment makes it first, from python3
# alone. A stamp file in the environment makes the second run quick.

PYTHON ?= python3
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PYTEST_ARGS ?=

# Two processes: as many as the smallest machine has cores. Tests of one file share what they build.
TWO := -n 2 --dist loadfile

RUN := .venv/bin/python
ENV := .venv/.installed

# Environments of their own: triton-ascend brings another `triton`, vllm another set of packages.
# Their tests run where the folder with its requirements exists.
EXTRA_TESTS := $(foreach kind,ascend vllm,$(if $(wildcard tests/$(kind)/requirements.txt),test-$(kind)))
EXTRA_TESTS += $(if $(filter test-vllm,$(EXTRA_TESTS)),test-releases)

# Each run leaves its own coverage data; `coverage`, at the end of `make test`, adds them up.
MEASURED_PYTEST = COVERAGE_FILE=.coverage.$@ $(1) -m coverage run -m pytest

.PHONY: public-kernels help demo test test-main test-interpreted test-sanitizers \
	test-wheel test-aarch64 test-report test-ascend test-vllm docs test-docs \
	test-releases forget-coverage coverage lint bench bench-compare verify-long clean \
	record-counts record-counts-ascend parts bench-regress bench-gpu bench-history \
	check check-main check-interpreted
.NOTPARALLEL:

help:
	@echo 'make demo         replay a recorded schedule, check every slot, draw the block tables'
	@echo 'make test         all tests, on the source tree and on the built wheel'
	@echo 'make check        the quick part of them, with lint: under three minutes'
	@echo 'make bench        benchmarks of the host paths; JSON under bench/results/'
	@echo 'make bench-compare  the same again, beside the run before'
	@echo 'make bench-regress  slower than BASE=revision? both measured in turns; bench-gpu: on a GPU'
	@echo 'make record-counts  after a change of counts that is meant; record-counts-ascend: of those for it'
	@echo 'make verify-long  the long verification runs (hours)'
	@echo 'make lint         ruff and mypy --strict'
	@echo 'make docs         the documentation site, build/site/index.html'

demo: $(ENV)
	mkdir -p demo
	.venv/bin/fused-slots demo --output demo $(DEMO_ARGS)

PARTS := forget-coverage test-main test-docs test-interpreted test-sanitizers test-triton test-wheel \
	test-aarch64 test-report $(EXTRA_TESTS) check-pythons coverage

test:
	+@.ci/parts $(PARTS)

# Something of every subsystem, chosen by what it takes.
check:
	+@.ci/parts lint check-main check-interpreted

CHECKED := $(addprefix tests/,backends inspect kernels/test_entries.py kernels/test_launch_order.py \
	$(addprefix test_,arguments.py block_tables.py context_parallel.py counts.py docs.py \
	env.py groups.py host_halves.py imports.py layout.py numeric_edges.py pools.py reference.py \
	request_slots.py row_writes.py rows.py torch_defaults.py vllm_ascend_v1.py vllm_config.py \
	vllm_plugin.py vllm_v1.py vllm_v2.py) $(addprefix cli/test_,doctor.py explain.py progress.py \
	schedules.py) $(addprefix recording/test_,check.py replay.py schedule.py))
check-main: $(ENV)
	$(RUN) -m pytest $(CHECKED) \
		'tests/kernels/test_compile.py::test_every_variant_needs_what_is_recorded[sm_90-everything]' \
		$(TWO) $(PYTEST_ARGS)

check-interpreted: $(ENV)
	TRITON_INTERPRET=1 $(RUN) -m pytest -n 2 $(PYTEST_ARGS) \
		$(addprefix tests/kernels/interpreted/test_,captured_step.py launch_on_nothing.py \
		gather_with_writes.py ascend_forms.py row_writes.py)

# What `.ci/run` runs, part by part.
parts:
	@echo lint $(PARTS)

test-main: $(ENV)
	$(call MEASURED_PYTEST,$(RUN)) $(TWO) $(PYTEST_ARGS)

# Warnings are errors. The main environment's packages come behind Sphinx's own.
docs: .venv-docs/.installed
	.venv-docs/bin/python -m sphinx -q -W --keep-going -E docs build/site
	@echo build/site/index.html

test-docs: docs
	$(RUN) -m pytest tests/test_docs.py tests/test_tutorial.py $(PYTEST_ARGS)

.venv-docs/.installed: docs/requirements.txt $(ENV)
	$(call make_venv,.venv-docs)
	.venv-docs/bin/python $(PIP_INSTALL) -r docs/requirements.txt
	$(call see_main_packages,.venv-docs)
	@touch $@

# Triton decides at import whether its kernels are compiled or interpreted. The simulated steps
# cover nothing that the others do not, and take twice as long when coverage is measured.
SIMULATED := tests/kernels/interpreted/test_simulated.py
test-interpreted: $(ENV)
	TRITON_INTERPRET=1 $(call MEASURED_PYTEST,$(RUN)) tests/kernels/interpreted -n 2 $(PYTEST_ARGS) \
		--ignore $(SIMULATED)
	TRITON_INTERPRET=1 $(RUN) -m pytest $(SIMULATED) -n 2 $(PYTEST_ARGS)

# The native half of staging with the compiler's sanitizers in it, called as nobody should. Python's
# own allocator would hide from them what lies beside a block.
SANITIZED := .cache/sanitized/_staging.so
test-sanitizers: $(ENV)
	mkdir -p $(dir $(SANITIZED))
	$(CC) -shared -fPIC -g -O1 -std=c99 -fno-omit-frame-pointer -fsanitize=address,undefined \
		-fno-sanitize-recover=all -DPy_LIMITED_API=0x030B0000 \
		-I$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("include"))') \
		fused_slots/host/_staging.c -o $(SANITIZED)
	PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) \
		$(RUN) tests/staging_fuzz.py --calls 20000 --extension $(SANITIZED)

# What depends on the release of Triton, under those of other vLLM releases than the main one's: each
# compiles all variants, launches through its own launcher, and interprets a few.
OTHER_TRITONS := 3.6.0 3.8.0
INTERPRETED := $(addprefix tests/kernels/interpreted/test_,launch_on_nothing.py captured_step.py \
	gather_with_writes.py far_positions.py)
test-triton: $(addprefix test-triton-,$(OTHER_TRITONS))
test-triton-%: .venv-triton-%/.installed
	.venv-triton-$*/bin/python -m pytest tests/kernels/test_compile.py \
		tests/kernels/test_launch_order.py -k 'not amd and not thousand' -n 2 --dist loadgroup
	TRITON_INTERPRET=1 .venv-triton-$*/bin/python -m pytest $(INTERPRETED) -n 2

# After a change that is meant: what is imported, launched and allocated, and compiled kernels.
record-counts: $(ENV) $(foreach release,$(OTHER_TRITONS),.venv-triton-$(release)/.installed)
	$(RUN) -m tests.counts
	for python in $(RUN) $(foreach release,$(OTHER_TRITONS),.venv-triton-$(release)/bin/python); do \
		$$python -m tests.kernels.resources || exit 1; done

# Ascend's, counted in compiled and in executed code; the gate's variants take some minutes.
record-counts-ascend: .venv-ascend/.installed
	.venv-ascend/bin/python -m pytest tests/ascend/test_counts.py tests/ascend/test_gate.py \
		--write-budgets -n 0

# Other Pythons, and whether pip can install what is asked for; a pip that reads metadata alone.
check-pythons: $(ENV) .cache/pip/.installed
	$(RUN) -m pytest tests/pythons -n 2 --dist worksteal $(PYTEST_ARGS)

.cache/pip/.installed: constraints.txt
	rm -rf .cache/pip
	$(RUN) $(PIP_INSTALL) --target .cache/pip -c constraints.txt pip
	@touch $@

# The wheel is what users get: built from the sdist, it must carry every file it needs, run on any
# Linux that this tag names, and work without the source tree. The sdist's own tests run in it.
BUILT := .cache/wheel
PLATFORM := manylinux_2_17_$(shell uname -m)
test-wheel: $(ENV) .venv-artefacts/.installed
	rm -rf build $(BUILT) && mkdir -p $(BUILT)/sdist
	$(RUN) -m build --outdir $(BUILT) . > $(BUILT)/build.log || { cat $(BUILT)/build.log; exit 1; }
	PATH=$(CURDIR)/.venv-artefacts/bin:$$PATH auditwheel repair --plat $(PLATFORM) \
		-w $(BUILT)/manylinux $(BUILT)/*.whl
	.venv-artefacts/bin/twine check --strict $(BUILT)/manylinux/*.whl $(BUILT)/*.tar.gz
	$(RUN) -m tests.artefacts.contents $(BUILT)/manylinux/*.whl $(BUILT)/*.tar.gz
	$(PYTHON) -m venv $(BUILT)/venv
	PIP_CONSTRAINT=constraints.txt $(BUILT)/venv/bin/python $(PIP_INSTALL) $(BUILT)/manylinux/*.whl
	cd $(BUILT) && venv/bin/python -I ../../tests/wheel_smoke.py venv/bin/fused-slots
	tar -xzf $(BUILT)/*.tar.gz --strip-components=1 -C $(BUILT)/sdist
	cd $(BUILT)/sdist && $(CURDIR)/$(RUN) setup.py -q build_ext --inplace && $(CURDIR)/$(RUN) -m pytest \
		tests/test_reference.py tests/test_block_tables.py tests/test_host_halves.py tests/test_docs.py

# Most Ascend hosts are aarch64.
test-aarch64: $(ENV) .venv-artefacts/.installed
	tests/artefacts/aarch64.sh $(RUN) .venv-artefacts/bin

# The page of a recording is looked at in a browser.
test-report: $(ENV)
	@if command -v chromium && command -v chromedriver; then \
		$(RUN) -m pytest tests/browser $(PYTEST_ARGS); \
	else echo 'not run: the packages chromium and chromium-driver are missing'; fi

# vllm-ascend's own kernels and those of its vllm, to be compiled and counted beside ours: unpacked,
# never installed.
public-kernels: .venv-ascend/.installed
	.venv-ascend/bin/python -c 'from tests.releases.releases import fetch, fetch_source; \
		fetch_source("vllm-ascend", "0.30.0rc2"); fetch("vllm", "0.30.0")'

test-ascend: .venv-ascend/.installed public-kernels
	.venv-ascend/bin/python -m pytest tests/ascend $(PYTEST_ARGS)

test-vllm: .venv-vllm/.installed
	$(call MEASURED_PYTEST,.venv-vllm/bin/python) tests/vllm $(TWO) $(PYTEST_ARGS)

# The Python files of every release that the plugin knows, five of vllm's and two of vllm-ascend's at
# work; each test is a process in one release, two at a time.
test-releases: .venv-vllm/.installed .venv-ascend/.installed
	.venv-vllm/bin/python tests/releases/releases.py
	.venv-vllm/bin/python -m pytest tests/releases/test_releases.py tests/releases/test_ascend.py \
		-n 2 --dist worksteal $(PYTEST_ARGS)

forget-coverage:
	rm -f .coverage .coverage.*

coverage: $(ENV)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report --skip-covered --show-missing

lint: $(ENV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check fused_slots bench
	$(RUN) -m mypy

bench: $(ENV)
	.venv/bin/fused-slots bench --save bench/results/latest.json $(BENCH_ARGS)

# `bench` writes over the run before, so that is kept aside.
bench-compare: $(ENV)
	mkdir -p .cache/bench && cp bench/results/latest.json .cache/bench/before.json
	$(MAKE) bench
	.venv/bin/pytest-benchmark compare .cache/bench/before.json bench/results/latest.json \
		--columns=median,iqr,rounds --group-by=fullname

# Slower than BASE? Otherwise BASE_DIR, an unpacked tree. The last commit, where there is no change.
BASE ?= $(shell git merge-base HEAD main 2>/dev/null | grep -v "$$(git rev-parse HEAD)" || echo HEAD~1)
REGRESS = -m bench.regress $(if $(BASE_DIR),--base-dir $(BASE_DIR),--base $(BASE)) $(REGRESS_ARGS)
bench-regress: $(ENV)
	$(RUN) $(REGRESS)

# Where torch and Triton are of the machine: its own Python, and no environment is made.
bench-gpu:
	$(PYTHON) $(REGRESS) --gpu

bench-history: $(ENV)
	$(RUN) -m bench.history_picture bench/results/history.svg

verify-long: $(ENV) .venv-ascend/.installed
	$(RUN) bench/verify_long.py
	.venv-ascend/bin/python bench/verify_ascend.py

clean:
	rm -rf .venv .venv-* .cache build dist fused_slots/host/_staging*.so

# A failed `python3 -m venv` leaves half an environment behind; remove it and say what is missing.
define make_venv
	@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1) || { rm -rf $(1); \
		echo 'No virtual environment: on Debian run "apt-get install python3-venv"' >&2; exit 1; }
endef

# Installation compiles the native half in place.
SOURCES := pyproject.toml setup.py fused_slots/host/_staging.c

$(ENV): $(SOURCES) constraints.txt
	$(call make_venv,.venv)
	PIP_CONSTRAINT=constraints.txt $(RUN) $(PIP_INSTALL) -e '.[dev,cuda]'
	@touch $@

define see_main_packages
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(1)/main.path
	$(1)/bin/python -c 'import shutil, sysconfig; \
		shutil.copy("$(1)/main.path", sysconfig.get_path("purelib") + "/main.pth")'
endef

# Another Triton before the main environment's packages.
.venv-triton-%/.installed: $(ENV)
	$(call make_venv,.venv-triton-$*)
	.venv-triton-$*/bin/python $(PIP_INSTALL) --ignore-installed --no-deps triton==$*
	$(call see_main_packages,.venv-triton-$*)
	@touch $@

# requirements.txt is installed with dependencies, requirements-no-deps.txt without; the package
# itself comes from the source tree.
.venv-%/.installed: tests/%/requirements.txt $(wildcard tests/*/requirements-no-deps.txt) $(SOURCES)
	$(call make_venv,.venv-$*)
	.venv-$*/bin/python $(PIP_INSTALL) -r tests/$*/requirements.txt
	@if test -f tests/$*/requirements-no-deps.txt; then \
		.venv-$*/bin/python $(PIP_INSTALL) --no-deps -r tests/$*/requirements-no-deps.txt; fi
	.venv-$*/bin/python $(PIP_INSTALL) -c constraints.txt coverage
	.venv-$*/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@
