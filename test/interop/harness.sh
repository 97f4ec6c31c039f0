# shellcheck shell=bash
# Functions of all runs in this folder, for the lock, the network, processes, the table and the end. Each run sources it.
#
# A machine does one run at a time: a run holds a lock while it has its namespaces. $TMP is its folder, from harness_begin on.
# If $KEEP is set, the contents of $TMP are moved there at the end. With TRANSPORT=socket our daemons use kernel sockets.

BIN=bin KEEP='' PASSED=0 FAILED=0 LOCKED=

cannot() { echo "interop/${0##*/}: $*" >&2; exit 2; }

# needs WHAT:PACKAGE...: checks for root and the programs under test, and installs the missing ones of these commands or files.
needs() {
  [ "$(id -u)" -eq 0 ] || cannot "needs root"
  [ -x "$BIN/iwarpd" ] && [ -x "$BIN/iwarpctl" ] || cannot "no $BIN/iwarpd and $BIN/iwarpctl: run make build"
  .ci/need "$@" || cannot "not all of this can be installed: $*"
}

# over INTERFACE: the flags of a daemon that serves the interface.
over() {
  if [ "${TRANSPORT:-}" = socket ]; then echo "--transport socket"; else echo "--interface $1"; fi
}

# harness_begin NETNS...: takes the lock of the first namespace, and makes all of them.
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
    ip netns del "$ns" 2>/dev/null || true   # left by a run that was killed
    ip netns add "$ns"
    ip -n "$ns" link set lo up
  done
}

# harness_end removes all that the run has made. It calls the run's own at_end when all processes have ended.
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

# behind_wire NETNS OURS ADDR/LEN: makes tap0 and veth1 in NETNS, for test/impair to connect. The other end of veth1 is veth0
# in OURS, with the address. The kernel of NETNS does not have the address, so it does not respond for it.
behind_wire() {
  tap_up "$1"
  ip -n "$1" link add veth0 netns "$2" type veth peer name veth1
  ip netns exec "$2" ethtool -K veth0 tx off tso off gso off gro off >/dev/null 2>&1 || true
  ip -n "$2" addr add "$3" dev veth0
  ip -n "$2" link set veth0 up
  ip -n "$1" link set veth1 up
}

# started NAME: names the last background process, for stop. Its PID is kept in a file, since a check that starts a process
# again runs in a subshell.
started() {
  echo $! >"$TMP/$1.pid"
  disown
}

# stop SIGNAL NAME: sends the signal to the process, and waits up to a minute for its end.
stop() {
  local pid
  pid=$(cat "$TMP/$2.pid" 2>/dev/null) || return 0
  rm -f "$TMP/$2.pid"
  kill "-$1" "$pid" 2>/dev/null || return 0
  for _ in {1..600}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
}

# wait_for SECONDS PID CMD...: waits until CMD succeeds. It fails after that time, or when process PID has ended.
wait_for() {
  local end=$((SECONDS + $1)) pid=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] && kill -0 "$pid" 2>/dev/null || return 1
    sleep 0.1
  done
}

# row STATUS FORMAT COLUMN...: prints a row of the table and counts it as passed or failed.
row() {
  local mark=ok
  if [ "$1" -eq 0 ]; then PASSED=$((PASSED + 1)); else FAILED=$((FAILED + 1)) mark=FAIL; fi
  # shellcheck disable=SC2059
  printf "%-4s  $2\n" "$mark" "${@:3}"
}

# check NAME CMD...: prints a row, and the output of CMD if it fails.
check() {
  local name=$1 start=$EPOCHREALTIME why
  shift
  if why=$("$@" 2>&1); then
    row 0 '%-44s %s' "$name" "$(seconds "$start")"
  else
    row 1 '%-44s %s' "$name" "$(tail -8 <<<"$why")"
  fi
}

# seconds START: prints the seconds since START, an EPOCHREALTIME.
seconds() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s", b - a }'; }

# harness_count prints the last line of a run and returns its exit status.
harness_count() {
  echo "$PASSED passed, $FAILED failed"
  [ "$FAILED" -eq 0 ]
}
