# Everything from a fresh clone to a trained model, in an environment of its own.

DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3
# Another torch gets an environment and build folders of its own.
SUFFIX := $(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))
VENV ?= .venv$(SUFFIX)
BUILD ?= build
WERROR ?= OFF
PYTEST_ARGS ?=
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)

BIN := $(abspath $(VENV))/bin
WHEEL_BUILD := $(BUILD)/wheel$(SUFFIX)
DIST := $(BUILD)/dist$(SUFFIX)
DEMO_CPP := $(BUILD)/demo-cpp$(SUFFIX)
ENVIRONMENT := $(VENV)/.environment
INSTALLED := $(VENV)/.installed
SOURCES := $(shell find cpp/include cpp/src cpp/bindings cpp/cmake python -type f \
  -not -name '*.pyc') CMakeLists.txt pyproject.toml README.md LICENSE
PYTHON_FILES := python tests benchmarks examples cpp/cmake
CPP_FILES = $(shell git ls-files -co --exclude-standard \
  '*.h' '*.cpp' '*.cu' '*.cuh')
CMAKE_FILES = $(shell git ls-files -co --exclude-standard \
  'CMakeLists.txt' '*/CMakeLists.txt' '*.cmake')

.PHONY: help demo demo-cpp test test-cpp test-python bench wheel lint format format-check \
  types dev clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))
	@echo "With another torch: make test TORCH=2.14.1. More tests: PYTEST_ARGS=--slow."

demo: $(INSTALLED) ## Train a small GPT in fp32 and in fp16 (about four minutes)
	OMP_WAIT_POLICY=passive $(BIN)/python examples/train_char_gpt.py --out $(BUILD)/train_char_gpt.png

demo-cpp: $(INSTALLED) ## Train on handwritten digits from C++, likewise (about two minutes)
	PATH="$(BIN):$$PATH" cmake -S examples/cpp -B $(DEMO_CPP) -G Ninja \
	  -DCMAKE_PREFIX_PATH="$$($(BIN)/python -m fp16core --cmake-prefix)" >/dev/null
	PATH="$(BIN):$$PATH" cmake --build $(DEMO_CPP)
	OMP_WAIT_POLICY=passive $(DEMO_CPP)/train_digits --checkpoint $(DEMO_CPP)/digits.pt

test: test-python test-cpp ## Run all tests

test-python: $(INSTALLED)
	FP16CORE_WHEEL="$$(echo $(DIST)/*.whl)" FP16CORE_BUILD="$(WHEEL_BUILD)" \
	  $(BIN)/python -m pytest $(PYTEST_ARGS)

test-cpp: $(INSTALLED)
	folder=$$(sh cpp/tests/get_doctest.sh $(BUILD)/doctest) && \
	PATH="$(BIN):$$PATH" cmake $(WHEEL_BUILD) -DFP16CORE_BUILD_TESTS=ON \
	  -DFP16CORE_DOCTEST_DIR="$$folder" >/dev/null
	PATH="$(BIN):$$PATH" cmake --build $(WHEEL_BUILD)
	$(BIN)/ctest --test-dir $(WHEEL_BUILD) --output-on-failure

bench: $(INSTALLED) ## Measure the kernels and the whole step
	$(BIN)/python benchmarks/run.py

wheel: $(INSTALLED) ## Build the wheel into build/dist and install it into .venv
	@ls $(DIST)/*.whl

lint: format-check types ## Check formatting, style and types

format-check: $(ENVIRONMENT)
	$(BIN)/ruff check $(wildcard $(PYTHON_FILES))
	$(BIN)/ruff format --check $(wildcard $(PYTHON_FILES))
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/gersemi --check $(CMAKE_FILES)

# The stub of the extension is made by the build, so the installed package, which
# has the same sources, is what mypy reads.
types: $(INSTALLED)
	$(BIN)/mypy

format: $(ENVIRONMENT) ## Rewrite the sources as lint wants them
	$(BIN)/ruff check --fix $(wildcard $(PYTHON_FILES))
	$(BIN)/ruff format $(wildcard $(PYTHON_FILES))
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/gersemi -i $(CMAKE_FILES)

dev: ## Build for working on the sources, then: PYTHONPATH=build/site pytest
	folder=$$(sh cpp/tests/get_doctest.sh $(BUILD)/doctest) && \
	cmake -S . -B $(BUILD)/dev -G Ninja -DFP16CORE_BUILD_TESTS=ON \
	  -DFP16CORE_DOCTEST_DIR="$$folder" \
	  -DPython_EXECUTABLE="$$(command -v $(PYTHON))"
	cmake --build $(BUILD)/dev
	cmake --install $(BUILD)/dev --prefix $(BUILD)/site/fp16core >/dev/null
	cp -rsf $(CURDIR)/python/fp16core $(BUILD)/site/

clean: ## Remove what was built; .venv stays
	rm -rf $(BUILD) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(INSTALLED)

$(ENVIRONMENT): $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  "torch==$(TORCH)" $(addprefix -r ,$(sort $(wildcard requirements/*.txt)))
	touch $@

$(INSTALLED): $(ENVIRONMENT) $(SOURCES)
	rm -rf $(DIST)
	PATH="$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet . \
	  --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings build-dir=$(WHEEL_BUILD) \
	  --config-settings cmake.define.FP16CORE_WERROR=$(WERROR) \
	  --config-settings cmake.define.FP16CORE_BUILD_TESTS=OFF \
	  --wheel-dir $(DIST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --force-reinstall --no-deps $(DIST)/*.whl
	touch $@
