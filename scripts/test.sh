#!/bin/sh
# The tests: `sh scripts/test.sh [FOLDER] [PYTEST ARGUMENTS]`, where FOLDER is the environment, `.venv` by default.
set -eu
cd "$(dirname -- "$0")/.."
venv=${1:-.venv}
if [ $# -gt 0 ]; then shift; fi
# Many tests start several processes: one thread each, or they take the cores from one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -eq 0 ]; then exec "$venv/bin/python" scripts/lanes.py; fi
exec "$venv/bin/python" -m pytest "$@"
