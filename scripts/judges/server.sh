# Sourced by the judges of a running server: starts one with the demo model, on ports of its own.
# The judge runs offline: what it asks of another host goes to a proxy that is not there. At the end
# the server must stop by itself at SIGTERM, with 0 and no error in its log.
source "$(dirname "${BASH_SOURCE[0]}")/peers.sh"
work=$(mktemp -d)
trap end_judge EXIT
server=

in_jaxserve() { "$python" -c 'import sys; from jaxserve.cli.main import main; sys.exit(main())' "$@"; }

serve() { # serve ARGUMENT...: sets `address` of gRPC and `url` of HTTP, once it accepts requests
  : >"$work/server.log"
  "$python" -c 'import sys; from jaxserve.cli.main import main; sys.exit(main())' \
    serve --port 0 --http-port 0 "$@" >>"$work/server.log" 2>&1 &
  server=$!
  until grep -q ' serving model=' "$work/server.log"; do
    kill -0 "$server" 2>/dev/null || { cat "$work/server.log" >&2; exit 2; }
    sleep 0.2
  done
  address=$(sed -n 's/.* listening address=\([^ ]*\).*/\1/p' "$work/server.log")
  url=$(sed -n 's/.* serving HTTP url=\([^ ]*\).*/\1/p' "$work/server.log")
}

serve_tenants() { # serve_tenants ARGUMENT...: with keys, `key` of who may all and `limited_key` of who may little
  (umask 077 && in_jaxserve keys new --file "$work/keys.jsonl" --tenant judge >"$work/key" \
    && in_jaxserve keys new --file "$work/keys.jsonl" --tenant limited >"$work/limited_key")
  key=$(cat "$work/key") limited_key=$(cat "$work/limited_key")
  cat >"$work/server.toml" <<TOML
[auth]
keys_file = "$work/keys.jsonl"
[tenants.named.judge]
[tenants.named.limited]
requests_per_minute = 1
max_priority = 0
TOML
  serve --config "$work/server.toml" "$@"
}

offline() { # offline COMMAND...
  env -u HF_HUB_OFFLINE http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 \
    HTTP_PROXY=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9 \
    no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost "$@"
}

stop_server() { # with SIGTERM; it must end with 0, and without an error in its log
  local ended=0
  kill -TERM "$server" 2>/dev/null || true
  wait "$server" || ended=$?
  server=
  if [ "$ended" != 0 ] || grep -E ' (ERROR|CRITICAL) |Traceback' "$work/server.log" >&2; then
    tail -n 20 "$work/server.log" >&2
    echo "DISAGREES: the server ended with $ended; its log is above" >&2
    return 1
  fi
}

end_judge() {
  local judged=$?
  if [ -n "$server" ]; then stop_server || judged=1; fi
  rm -r "$work"
  exit "$judged"
}
