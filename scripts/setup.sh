#!/bin/sh
# Makes the environment that everything else runs in: `sh scripts/setup.sh [FOLDER]`, `.venv` by default.
#
# It installs the pinned packages of requirements.lock and this project (editable) into FOLDER and writes a stamp
# there; while the stamp is true it does nothing. PYTHON names the interpreter to build from. Only FOLDER's own pip
# is ever called, and only with an environment required, so no other Python is touched.
set -eu

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"
venv=${1:-.venv}
python=${PYTHON:-python3}
stamp=$venv/.stretto-setup

fail() {
    echo "setup: $*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

version_of() {
    "$1" -V 2>&1 | head -n 1
}

is_where_it_was_made() { # an environment that was moved, or its whole checkout, names its old place in its scripts
    grep -qF "$(CDPATH= cd -- "$venv" && pwd -P)" "$venv/bin/activate" 2>/dev/null
}

fingerprint() { # what the environment is made of, and where: it and the editable install hold their folders' paths
    printf '%s\n%s\n' "$root" "$(CDPATH= cd -- "$venv" && pwd -P)"
    "$venv/bin/python" -c 'import sys; print(sys.version)'
    cksum requirements.lock pyproject.toml scripts/setup.sh
}

if [ -x "$venv/bin/stretto" ] && [ -f "$stamp" ] && is_new_enough "$venv/bin/python" \
    && [ "$(fingerprint)" = "$(cat "$stamp")" ]; then
    exit 0
fi
# From here on, a setup that is cut short must be redone.
rm -f "$stamp"

# A variable meant for another Python must not reach into this one.
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER PIP_ROOT VIRTUAL_ENV
export PIP_REQUIRE_VIRTUALENV=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv is there and is no virtual environment; move it away, or name another folder: make setup VENV=FOLDER"
fi
if ! { is_new_enough "$venv/bin/python" && is_where_it_was_made \
    && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    command -v "$python" >/dev/null 2>&1 \
        || fail "Python 3.11 or newer is needed, and $python is not here; name one: make setup PYTHON=/path/to/python3"
    is_new_enough "$python" \
        || fail "Python 3.11 or newer is needed, and $python is: $(version_of "$python"); name one: make setup PYTHON=python3.12"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 \
        || fail "$python has no venv module with pip in it; install it (Debian and Ubuntu: python3-venv) or name another: make setup PYTHON=python3.12"
    echo "setup: making $venv with $(version_of "$python")"
    "$python" -m venv --clear "$venv" || fail "$python could not make $venv (the reason is above)"
fi

quiet=--quiet
if [ -t 1 ]; then quiet=; fi
echo "setup: installing $(grep -c == requirements.lock) pinned packages into $venv (torch is large: this takes minutes on a slow line)"
# shellcheck disable=SC2086  # an empty $quiet must vanish
"$venv/bin/python" -m pip install $quiet --no-compile -r requirements.lock \
    || fail "pip could not install the pinned packages (the reason is above); the same command goes on from here"
# Two thirds of an install are compiling, for which pip takes one core. A file that can't be compiled is no hindrance.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true
# The lock has installed the build tool, so nothing is downloaded for this.
"$venv/bin/python" -m pip install $quiet --no-deps --no-build-isolation -e . \
    || fail "pip could not install stretto itself (the reason is above)"
[ -x "$venv/bin/stretto" ] || fail "the install left no $venv/bin/stretto"
fingerprint >"$stamp.new"
mv "$stamp.new" "$stamp"
echo "setup: done; $venv/bin/stretto is ready"
