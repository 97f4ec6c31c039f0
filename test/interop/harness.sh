# shellcheck shell=bash
# What the runs of this folder share: the lock, the network, the processes, the table, the end. Sourced by each of them.
#
# A run is one at a time on a machine: it holds a lock while it has its namespaces. $TMP is its folder from harness_begin on;
# what is in it at the end stays in $KEEP, if that is set.

BIN=bin KEEP='' PASSED=0 FAILED=0 LOCKED=

cannot() { echo "interop/${0##*/}: $*" >&2; exit 2; }

# needs WHAT:PACKAGE...: root, the programs under test, and these commands or files: what is missing is installed.
needs() {
  [ "$(id -u)" -eq 0 ] || cannot "needs root"
  [ -x "$BIN/iwarpd" ] && [ -x "$BIN/iwarpctl" ] || cannot "no $BIN/iwarpd and $BIN/iwarpctl: run make build"
  .ci/need "$@" || cannot "not all of this can be installed: $*"
}

# harness_begin NETNS...: takes the lock of the first name, and makes the namespaces.
harness_begin() {
  local ns
  NAMESPACES=("$@")
  TMP=$(mktemp -d)
  trap harness_end EXIT
  trap 'exit 130' INT TERM
  exec 9>"${XDG_RUNTIME_DIR:-/run}/$1.lock"
  flock -n 9 || cannot "another run is going on"
  LOCKED=1
  for ns; do
    ip netns del "$ns" 2>/dev/null || true   # of a run that was killed
    ip netns add "$ns"
    ip -n "$ns" link set lo up
  done
}

# harness_end takes away all that the run has made. A run's own at_end is called when nothing runs any more.
harness_end() {
  local name pid ns
  trap - EXIT INT TERM
  for name in "${!VM_PID[@]}"; do vm_stop "$name"; done
  for name in "$TMP"/*.pid; do [ ! -e "$name" ] || stop TERM "$(basename "$name" .pid)"; done
  for pid in $(jobs -p); do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  ! declare -F at_end >/dev/null || at_end
  if [ -n "$LOCKED" ]; then
    for ns in "${NAMESPACES[@]}"; do ip netns del "$ns" 2>/dev/null || true; done
  fi
  if [ -n "$KEEP" ]; then
    rm -rf "$TMP/initrd.gz" "$TMP/overlay"
    mkdir -p "$KEEP" && cp -r "$TMP"/. "$KEEP"/ && echo "interop/${0##*/}: captures and logs are in $KEEP"
  fi
  rm -rf "$TMP"
}

# tap_up NETNS [ADDR/LEN [FLAG]]: tap0 of that namespace, with that address; FLAG is one of ip tuntap, such as multi_queue.
tap_up() {
  [ -c /dev/net/tun ] || { mkdir -p /dev/net && mknod /dev/net/tun c 10 200; }
  # shellcheck disable=SC2086
  ip netns exec "$1" ip tuntap add tap0 mode tap ${3:-}
  [ -z "${2:-}" ] || ip -n "$1" addr add "$2" dev tap0
  ip -n "$1" link set tap0 up
}

# behind_wire NETNS OURS ADDR/LEN: tap0 of NETNS, and beside it veth1, for test/impair to join them; its other end is veth0
# of OURS, with that address. The kernel of NETNS does not know it, and so does not answer for it.
behind_wire() {
  tap_up "$1"
  ip -n "$1" link add veth0 netns "$2" type veth peer name veth1
  ip netns exec "$2" ethtool -K veth0 tx off tso off gso off gro off >/dev/null 2>&1 || true
  ip -n "$2" addr add "$3" dev veth0
  ip -n "$2" link set veth0 up
  ip -n "$1" link set veth1 up
}

# started NAME: what was put in the background last is NAME from here on, for stop. Its number is in a file, for a check
# that starts one anew is a subshell.
started() {
  echo $! >"$TMP/$1.pid"
  disown
}

# stop SIGNAL NAME: sends it the signal, and waits till it is gone, a minute at most.
stop() {
  local pid
  pid=$(cat "$TMP/$2.pid" 2>/dev/null) || return 0
  rm -f "$TMP/$2.pid"
  kill "-$1" "$pid" 2>/dev/null || return 0
  for _ in {1..600}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
}

# wait_for SECONDS PID CMD...: until CMD succeeds; fails when the time is up or process PID is gone.
wait_for() {
  local end=$((SECONDS + $1)) pid=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] && kill -0 "$pid" 2>/dev/null || return 1
    sleep 0.1
  done
}

# row STATUS FORMAT COLUMN...: a row of the table, which counts as passed or failed.
row() {
  local mark=ok
  if [ "$1" -eq 0 ]; then PASSED=$((PASSED + 1)); else FAILED=$((FAILED + 1)) mark=FAIL; fi
  # shellcheck disable=SC2059
  printf "%-4s  $2\n" "$mark" "${@:3}"
}

# check NAME CMD...: a row; what CMD prints is shown if it fails.
check() {
  local name=$1 start=$EPOCHREALTIME why
  shift
  if why=$("$@" 2>&1); then
    row 0 '%-44s %s' "$name" "$(seconds "$start")"
  else
    row 1 '%-44s %s' "$name" "$(tail -8 <<<"$why")"
  fi
}

# seconds START: since that EPOCHREALTIME.
seconds() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s", b - a }'; }

# harness_count is the last line of a run, and its exit status.
harness_count() {
  echo "$PASSED passed, $FAILED failed"
  [ "$FAILED" -eq 0 ]
}
