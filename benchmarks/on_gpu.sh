#!/usr/bin/env bash
# Everything that only a GPU can show, in less than nine minutes and without a network:
#
#   bash benchmarks/on_gpu.sh OUT
#
# Needs python3 (or $PYTHON) with a CUDA build of torch, nvcc and a C++ compiler; uses ninja, pytest, hypothesis,
# pytest-xdist and compute-sanitizer where they are there, and says what was left out where they are not. Packages in
# a folder of your own are found through PYTHONPATH. Builds the extension in this checkout, then tests, compares with
# the emulated kernels, checks with compute-sanitizer, and measures. OUT gets summary.md, report.json, log.txt and the
# numbers of single parts as JSON. Exit status 1 if a part failed or ran out of time.
#
# Without a GPU it runs the parts in the small, on the CPU, and says so: a check of this script itself. Options:
# see `bash benchmarks/on_gpu.sh --help`.
set -eu
exec "${PYTHON:-python3}" "$(dirname "$0")/on_gpu.py" "$@"
