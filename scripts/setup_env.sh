#!/usr/bin/env bash
# Builds .venv from the pinned requirements; does nothing while those are unchanged. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
stamp=.venv/.requirements.sha256

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: Python 3.11 or newer is needed, $python is $("$python" --version): set PYTHON" >&2
    exit 2
fi
wanted=$({ pwd; cat requirements/cpu.txt requirements/dev.txt requirements/nodeps.txt setup.py; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet -r requirements/dev.txt
.venv/bin/python -m pip install --quiet --no-deps -r requirements/nodeps.txt
.venv/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
printf '%s\n' "$wanted" > "$stamp"
