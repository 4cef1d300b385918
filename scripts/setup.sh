# Sourced by the other scripts: make .venv with this project in it, once, and again only when its inputs change.
# shellcheck shell=bash

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# setup_environment EXTRA: EXTRA is empty or the name of an extra, such as "test".
setup_environment() {
    local extra=$1 wanted stamp
    wanted=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | cksum)
    stamp=.venv/.ftrun-${extra:-base}
    if [ -x .venv/bin/ftrun ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    local python
    python=$(find_python) || { echo "Python 3.11 or newer is needed, with venv and pip. Install it, or set PYTHON=/path/to/python3." >&2; exit 1; }
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    echo "Installing into .venv (a few minutes the first time)..." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable ".${extra:+[$extra]}"
    echo "$wanted" >"$stamp"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}
