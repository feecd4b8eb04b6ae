# shellcheck shell=bash
# Sourced by the other scripts: `setup_venv FOLDER LOCK` leaves a virtual environment in FOLDER that
# holds exactly LOCK, the demo model and this project (editable), and makes nothing if it is there.
# With a third word, --lock-alone, it holds LOCK and nothing else.
#
# Everything is said on stderr. Works with uv or without it, and with bash 3.2 (macOS).

export HOME=${HOME:-~} # a bare environment may lack it; pyenv and pip look there

say() { echo "${0##*/}: $*" >&2; }

# Where packages come from is this machine's business; what is installed, and where, is ours.
unset_pip_settings() {
  local name
  for name in $(compgen -A export PIP_); do
    case $name in
      PIP_CERT | PIP_CLIENT_CERT | PIP_INDEX_URL | PIP_EXTRA_INDEX_URL | PIP_FIND_LINKS | \
        PIP_NO_INDEX | PIP_PROXY | PIP_TRUSTED_HOST | PIP_DEFAULT_TIMEOUT | PIP_RETRIES | \
        PIP_CACHE_DIR | PIP_CONFIG_FILE | PIP_KEYRING_PROVIDER) ;;
      *) unset "$name" ;;
    esac
  done
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
}

has_uv() { uv --version >/dev/null 2>&1; } # run it: a shim may exist and fail

# Prints "fits PATH" if the interpreter will do, else why not. PATH is the one behind a shim or a
# virtual environment (perhaps the very one that is about to be made again).
judge_python() {
  local modules="ssl, venv"
  has_uv || modules="$modules, ensurepip"
  { "$1" -I - "$modules" | grep .; } 2>&1 <<'PY' | head -n 1 || true
import importlib.util, sys, sysconfig
missing = [name for name in sys.argv[1].split(", ") if importlib.util.find_spec(name) is None]
if sys.version_info < (3, 12):
    print("is Python %d.%d.%d" % sys.version_info[:3])
elif sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("is %s, not the usual CPython build" % sys.version.replace("\n", " "))
elif missing:
    print("has no module %s (Debian: install python3-venv)" % missing[0])
else:
    print("fits " + sys._base_executable)
PY
}

# One interpreter a line, best first; each may be missing, too old or broken.
python_candidates() {
  [[ -z ${PYTHON:-} ]] || echo "$PYTHON"
  if has_uv; then
    uv python find --system --no-project 3.13 2>/dev/null || true
    uv python find --system --no-project 3.12 2>/dev/null || true
  fi
  local name root
  for name in python3.13 python3.12 python3; do
    command -v "$name" 2>/dev/null || true
  done
  root=$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")
  for name in 13 12 14; do
    # shellcheck disable=SC2012  # the names are version numbers
    ls -d "$root"/versions/3."$name".*/bin/python 2>/dev/null | sort -rV || true
  done
}

# Prints the first candidate that works.
find_python() {
  local candidate verdict tried=""
  while read -r candidate; do
    verdict=$(judge_python "$candidate")
    if [[ $verdict == "fits "* ]]; then
      echo "${verdict#fits }"
      return
    fi
    tried+="  $candidate: ${verdict:-does not run}"$'\n'
  done < <(python_candidates)
  if has_uv && uv python install 3.13 >&2; then # last of all: let uv bring one
    uv python find --system --no-project 3.13 && return
  fi
  say "no Python 3.12 or newer was found. Install one (python3.12 with python3.12-venv, pyenv"
  say "install 3.13, or uv), or name one: PYTHON=/path/to/python3.12 $0"
  [[ -z $tried ]] || printf 'tried:\n%s' "$tried" >&2
  return 1
}

# What the environment is made of, in one line. Fails if its interpreter does not run.
venv_stamp() { # FOLDER LOCK
  "$1/bin/python" -I - "$1" pyproject.toml scripts/setup_venv.sh locks/demo-model.txt "$2" <<'PY'
import hashlib, pathlib, sys
folder, *files = map(pathlib.Path, sys.argv[1:])
digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
version = ".".join(map(str, sys.version_info[:3]))
# the folder: neither scripts nor the editable install survive a move of the checkout
print(folder.absolute(), version, sys.base_prefix, digest)
PY
}

is_fresh() { # FOLDER LOCK
  [[ -f $1/jaxserve-stamp ]] && [[ $(venv_stamp "$@" 2>/dev/null) == "$(cat "$1/jaxserve-stamp")" ]]
}

install() { # FOLDER ARGS...
  local folder=$1
  shift
  if has_uv; then
    uv pip install --quiet --python "$folder/bin/python" --compile-bytecode "$@"
  else
    "$folder/bin/python" -I -m pip install --quiet --quiet --progress-bar off "$@"
  fi
}

# Steps are joined by hand: `set -e` is off inside a function whose status is looked at.
make_venv() { # FOLDER LOCK [--lock-alone]
  local folder=$1 lock=$2 python
  python=$(find_python) || return 1
  say "making $folder with $python (once; a minute or two)"
  rm -rf "$folder"
  if has_uv; then
    uv venv --quiet --no-project --python "$python" "$folder" || return 1
  else
    "$python" -I -m venv "$folder" || return 1
  fi
  say "installing $lock"
  install "$folder" --no-deps --require-hashes -r "$lock" || return 1
  if [[ ${3:-} != --lock-alone ]]; then
    say "installing the demo model and jaxserve"
    install "$folder" --no-deps --require-hashes -r locks/demo-model.txt || return 1
    install "$folder" --no-deps --no-build-isolation --editable . || return 1
  fi
  # last: a folder without it was left half-made and is made again
  venv_stamp "$folder" "$lock" >"$folder/jaxserve-stamp"
}

setup_venv() { # FOLDER LOCK [--lock-alone]
  if is_fresh "$1" "$2"; then return; fi
  # Two scripts at once: the second waits, then finds it made. (macOS has no flock: there, don't.)
  exec 9<scripts/setup_venv.sh
  if command -v flock >/dev/null; then flock 9; fi
  if ! is_fresh "$1" "$2" && ! (unset_pip_settings && make_venv "$@" 1>&2 9<&-); then
    say "$1 could not be made; the lines above say why"
    exit 1
  fi
  exec 9<&-
}
