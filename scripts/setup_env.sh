#!/usr/bin/env bash
# Builds .venv (main), .venv-xla (xla), .venv-docs (docs) from pinned requirements; does nothing while those are unchanged. PYTHON: interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
case "${1:-main}" in
    main) venv=.venv requirements=requirements/dev.txt needed_gib=4 ;;  # 2 to keep, and the downloads
    xla) venv=.venv-xla requirements=requirements/xla.txt needed_gib=12 ;;  # 8 to keep
    docs) venv=.venv-docs requirements=requirements/docs.txt needed_gib=1 ;;
    *) echo "error: unknown track $1: main, xla or docs" >&2; exit 2 ;;
esac
stamp=$venv/.requirements.sha256

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: Python 3.11 or newer is needed, $python is $("$python" --version): set PYTHON" >&2
    exit 2
fi
wanted=$({ pwd; cat "$requirements" requirements/{cpu,common,nodeps}.txt setup.py; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
free_kib=$(df -Pk . 2>/dev/null | awk 'NR == 2 { print $(NF - 2) }') || true
made_kib=$(du -sk "$venv" 2>/dev/null | cut -f 1) || true
if [ ! -f "$stamp" ] && [[ "$free_kib" =~ ^[0-9]+$ ]] && (((free_kib + ${made_kib:-0}) >> 20 < needed_gib)); then
    echo "error: making $venv takes $needed_gib GiB, $((free_kib >> 20)) GiB are free in $PWD: make room, or move the checkout" >&2
    exit 2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet -r "$requirements"
if [ "$venv" != .venv-docs ]; then
    "$venv/bin/python" -m pip install --quiet --no-deps -r requirements/nodeps.txt
    "$venv/bin/python" -m pip install --quiet --no-build-isolation --no-deps -e .
fi
printf '%s\n' "$wanted" > "$stamp"
