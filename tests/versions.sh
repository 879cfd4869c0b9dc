#!/usr/bin/env bash
# The suite with other versions than the newest: by hand, before a release.
#
#   tests/versions.sh oldest   the lower bounds of pyproject.toml
#   tests/versions.sh jetson   what pip resolves on a Jetson with JetPack 6 (Python 3.10, aarch64)
#
# What follows goes to pytest, such as `tests/graph -m "not slow and not gpu"`; without it, the whole suite runs. PYTHON
# selects the interpreter (default: python3.11), VENV the environment, which is kept (default: a temporary folder).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?oldest or jetson}
shift
venv=${VENV:-$(mktemp -d)}

case $kind in
oldest)
    # "name>=1.2; marker" -> name==1.2, of the dependencies
    pins=$(sed -n '/^dependencies = \[/,/^\]/s/^ *"\([a-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)
    ;;
jetson)
    pins="numpy==2.2.6 onnx==1.23.2 onnxruntime==1.23.2 onnxruntime-gpu==1.23.2 scipy==1.15.3 optuna==5.0.0"
    ;;
*)
    echo "error: $kind is neither oldest nor jetson" >&2
    exit 2
    ;;
esac
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
printf '%s\n' $pins >"$venv/pins.txt"
"$venv/bin/pip" install --quiet --disable-pip-version-check -c "$venv/pins.txt" -e '.[test]'
# There is no TensorRT-RTX for aarch64: the tests marked `tensorrt_rtx` are skipped.
[ "$kind" = oldest ] || "$venv/bin/pip" list --format=freeze | sed -n 's/^\(tensorrt[-_]rtx[^=]*\)==.*/\1/p' |
    xargs --no-run-if-empty "$venv/bin/pip" uninstall --quiet --yes
"$venv/bin/pip" list --format=freeze | grep -iE "^($(printf '%s\n' $pins | sed 's/==.*//' | paste -sd'|'))=="
exec "$venv/bin/python" -m pytest -p no:cacheprovider "$@"
