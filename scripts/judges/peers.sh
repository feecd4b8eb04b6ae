# Sourced by the judges: where their files are, and the interpreters of the peers.
# The peers live in venvs outside the tree: in JUDGES_DIR, by default in the user's cache folder (torch
# is large, and llama.cpp compiles for some minutes the first time), or wherever TRANSFORMERS_PYTHON,
# LLAMACPP_PYTHON and the like, interpreters that have them, say.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
judges=${JUDGES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/jaxserve/judges}
python=.venv/bin/python
[ -x "$python" ] || { echo "judges: no .venv; run scripts/test once first" >&2; exit 2; }
mkdir -p "$judges"

venv() { # venv NAME PACKAGE...: prints the interpreter of a venv that has them
  local folder=$judges/$1
  shift
  if [ ! -e "$folder/complete" ]; then
    "$python" -m venv --clear "$folder" >&2
    "$folder/bin/pip" install -q "$@" >&2
    touch "$folder/complete"
  fi
  echo "$folder/bin/python"
}
transformers_python() { echo "${TRANSFORMERS_PYTHON:-$(venv transformers torch transformers accelerate gguf)}"; }
llamacpp_python() { echo "${LLAMACPP_PYTHON:-$(venv llamacpp llama-cpp-python)}"; }
openai_python() { echo "${OPENAI_PYTHON:-$(venv openai openai)}"; }
pydantic_ai_python() { echo "${PYDANTIC_AI_PYTHON:-$(venv pydantic_ai 'pydantic-ai-slim[openai]')}"; }
lm_eval_python() { echo "${LM_EVAL_PYTHON:-$(venv lm_eval 'lm-eval[api]==0.4.13' transformers)}"; }
aiperf_python() { echo "${AIPERF_PYTHON:-$(venv aiperf 'aiperf==0.13.0')}"; }
schemathesis_python() { echo "${SCHEMATHESIS_PYTHON:-$(venv schemathesis 'schemathesis==4.32.5')}"; }
