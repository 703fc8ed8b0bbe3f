# Sourced by the other scripts: makes .venv with the CPU build of torch, again only when its ingredients change.
# Usage: . scripts/venv.sh EXTRAS, as in: . scripts/venv.sh demo,dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$1
python=${PYTHON:-python3}
wanted=$(cat pyproject.toml constraints-cpu.txt | cksum | tr ' ' -)
made=.venv/made-for-$wanted
if ! { [ -f "$made" ] && grep -q "^$extras$" "$made"; }; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    echo "installing .[$extras] into .venv (torch comes as the CPU build; some minutes with an empty package cache)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e ".[$extras]" \
        2> >(grep -v "^WARNING: Location" >&2)
    rm -f .venv/made-for-*
    case $extras in *dev*) printf '%s\n' demo dev demo,dev >"$made" ;; *) echo "$extras" >"$made" ;; esac
fi
export PATH="$PWD/.venv/bin:$PATH"
