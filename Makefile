# Needs Python 3.11 or newer, make and a C compiler; everything else goes into .venv.
#
#   make setup   the environment alone (about 2 minutes, 4 GB)
#   make demo    a working drafter for SmolLM2-135M on CPU: scripts 01 to 06
#   make test    the tests
#   make test-sabotage   a working drafter broken in a hundred ways, one at a time
#   make test-kill   kills, stops, full disks and damage on real stages, a hundred kills and more
#
# Every target may be interrupted and run again: what is finished is not done twice.

PYTHON = python3
CONFIG = configs/smollm2_cpu.yaml
SETUP_DONE = .venv/setup-done
TORCH = $(shell grep '^torch==' requirements-cpu.txt)

.PHONY: help setup demo test test-kill test-sabotage

help:
	@sed -n 's/^#   //p' Makefile

setup: $(SETUP_DONE)

# The stamp is written last. Without it the environment is made anew (half an installation looks
# whole to pip); with an older one it is brought up to date. torch comes from the configured index,
# else from PyTorch's own. The three packages uninstalled come along for another torch than this
# one and break transformers' import.
$(SETUP_DONE): requirements-cpu.txt requirements-cpu-nodeps.txt
	test -e $(SETUP_DONE) || $(PYTHON) -m venv --clear .venv
	rm -f $(SETUP_DONE)
	.venv/bin/pip install pip==26.3
	.venv/bin/pip install $(TORCH) || .venv/bin/pip install --index-url https://download.pytorch.org/whl/cpu $(TORCH)
	.venv/bin/pip install -r requirements-cpu.txt
	.venv/bin/pip install --no-deps -r requirements-cpu-nodeps.txt
	.venv/bin/pip uninstall --yes torchvision torchaudio torchcodec
	touch $(SETUP_DONE)

# The scripts in order; the first that fails stops the line and says what to do.
demo: setup
	.venv/bin/python tools/make_demo_verifier.py
	.venv/bin/python 01_prepare_data.py $(CONFIG)
	.venv/bin/python 02_gen_hidden_states.py $(CONFIG)
	.venv/bin/python 03_build_vocab_map.py $(CONFIG)
	.venv/bin/python 04_train.py $(CONFIG)
	.venv/bin/python 05_export.py $(CONFIG)
	.venv/bin/python 06_verify.py $(CONFIG)

test: setup
	.venv/bin/python -m pytest --durations=12 -m "not kill and not sabotage and not exhaustive"

test-kill: setup
	.venv/bin/python -m pytest --durations=12 -s -m kill tests/kill

# Those that need no engine are part of `make test` too.
test-sabotage: setup
	.venv/bin/python -m pytest --durations=12 tests/test_sabotage.py tests/test_verification_table.py \
		tests/e2e/test_sabotage_served.py
