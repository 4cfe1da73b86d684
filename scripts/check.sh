#!/bin/sh
# Lint and strict types: `sh scripts/check.sh [FOLDER]`, where FOLDER is the environment, `.venv` by default.
set -eu
cd "$(dirname -- "$0")/.."
python=${1:-.venv}/bin/python
echo "check: ruff"
"$python" -m ruff check --output-format concise .
echo "check: mypy --strict src"
"$python" -m mypy --strict src
