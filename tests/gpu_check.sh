#!/usr/bin/env bash
# Checks a machine with a GPU and measures it in one command, in under 6 minutes; the table comes last.
#
#   tests/gpu_check.sh [FOLDER] [--device cuda|cpu] [--tiny]
#
# FOLDER (default build/gpu) gets results.json, table.txt and a log of every part. Needs torch, triton, numpy, safetensors and
# pytest, and transformers for one row. PYTHON names the interpreter; the default is that of .venv where there is one, else
# python3. Ends with 1 where something FAILED or there was no time for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
make --silent link-tree
export PYTHONSAFEPATH=1
export PYTHONPATH="$PWD/build/import-root:$PWD/tests/support:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m gpu_check "$@"
