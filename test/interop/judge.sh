# shellcheck shell=bash
# judge PCAP PORT OURS [crc]: checks the iWARP connections to PORT in PCAP with tshark. It prints one line for each fault, or
# a summary, and returns 1 if there is a fault. The segments of address OURS, which may be empty, must also start and end at
# FPDU boundaries. With crc, each FPDU must have a correct CRC.
#
# A guest without hardware virtualization sometimes acknowledges a segment so late that our TCP sends it again. So OURS may
# retransmit what its peer had not acknowledged 5 ms before, where 5 ms allow for frames that cross, and which it had sent
# at least 10 ms before by its own clock, the timestamps: its shortest timer is the tail loss probe's (RFC 8985 section 7.2).
# The peer may probe too: soon, for what OURS had acknowledged, or then reports by D-SACK (RFC 2883) that it had received.

# tshark_knows DIR PROTOCOL...: makes DIR a configuration for tshark (WIRESHARK_CONFIG_DIR) with only these protocols. Others
# of the thousands that it knows could claim the payload, because of a client's port or by a heuristic.
tshark_knows() {
  mkdir -p "$1" && tshark -G protocols 2>/dev/null | cut -f 3 | grep -vxF "$(printf '%s\n' frame data eth ip ipv6 "${@:2}")" >"$1/disabled_protos"
}

judge() {
  local pcap=$1 port=$2 ours=$3 crc=${4:-} dir
  dir=$(mktemp -d "$TMP/judge.XXXX")
  tshark_knows "$dir/tshark" tcp iwarp_mpa iwarp_ddp_rdmap || return 1
  local -x WIRESHARK_CONFIG_DIR=$dir/tshark
  tshark -r "$pcap" -Y "tcp.port==$port" -w "$dir/one.pcap" 2>"$dir/err" || { cat "$dir/err"; return 1; }

  # One line for each frame, with what the dissectors found.
  tshark -2 -r "$dir/one.pcap" -o tcp.try_heuristic_first:TRUE -o tcp.check_checksum:TRUE -o ip.check_checksum:TRUE -T fields -E separator=';' -E occurrence=a -E aggregator=, \
    -e frame.number -e ip.src -e tcp.len -e tcp.flags.syn -e tcp.flags.reset -e frame.protocols -e iwarp_rdma.opcode \
    -e tcp.reassembled_in -e tcp.analysis.retransmission -e tcp.analysis.lost_segment -e tcp.analysis.out_of_order -e tcp.checksum.status \
    -e ip.checksum.status -e _ws.expert.severity -e _ws.expert.message -e tcp.segment.count -e iwarp_mpa.rev \
    -e frame.time_relative -e tcp.stream -e tcp.seq -e tcp.nxtseq -e tcp.ack -e tcp.options.timestamp.tsval 2>"$dir/err" >"$dir/frames"
  awk -F';' -v ours="$ours" '
    function bad(what) { if (n[what]++ < 3) print what ": frame " $1 ($15 != "" ? " (" $15 ")" : "") }
    # justified(i): the retransmission of line i had to be sent.
    function justified(i,   o, a, d) {
      for (o = i - 1; o > 0 && !(conn[o] == conn[i] && from[o] == from[i] && seq[o] <= seq[i] && seq[i] < end[o]); o--);
      for (a = o + 1; a <= NR && !(conn[a] == conn[i] && from[a] != from[i] && ack[a] >= end[i]); a++);
      if (from[i] == ours) return o > 0 && stamp[i] - stamp[o] >= 10 && (a > NR || at[a] > at[i] - 0.005)
      for (d = i + 1; d <= NR && !(conn[d] == conn[i] && from[d] == ours && dsack[d]); d++);
      return o > 0 && at[i] - at[o] < 0.2 && (a < i || d <= NR && at[d] < at[i] + 0.2)
    }
    { from[NR] = $2; at[NR] = $18; conn[NR] = $19; seq[NR] = $20 + 0; end[NR] = $21 + 0; ack[NR] = $22 + 0; stamp[NR] = $23; dsack[NR] = $15 ~ /D-SACK/ }
    $4 == "1" { conns++ }
    $9 != ""  { again[NR] = $1; resent++; next }   # tshark does not dissect its payload
    $10 != "" { bad("TCP segment missing from the capture") }
    $11 != "" { bad("TCP segment out of order") }
    ($12 == "0" && $15 !~ /0xffff instead of 0x0000/) || $13 == "0" { bad("wrong checksum") }   # Linux writes a sum of zero as 0xffff
    $6 ~ /malformed/ { bad("malformed") }
    $7 ~ /0x07/ { bad("Terminate") }
    $14 != "" {
      # Severities: 0x00400000 note, 0x00600000 warning, 0x00800000 error. This dissector does not know revision 2 (RFC 6581).
      s = $15; gsub(/(Res field is NOT set to zero|Rev field is NOT set to one) as required by RFC 5044/, "", s)
      gsub(/TCP Checksum 0xffff instead of 0x0000 \(see RFC 1624\)/, "", s)
      if (resent) gsub(/D-SACK Sequence|TCP window update|Duplicate ACK \(#[0-9]*\)/, "", s)   # caused by it
      gsub(/Connection (establish|finish|reset)[^,]*|This frame (initiates|undergoes) the connection closing/, "", s)
      if (ours == "") gsub(/TCP window specified by the receiver is now completely full/, "", s)   # flow control of Linux at both ends
      gsub(/[ ,]/, "", s)
      if (s != "" && $14 ~ /6291456|8388608|0x00600000|0x00800000/) bad("tshark objects")
    }
    $17 != "" { if (!rev[$17]++) revs = revs (revs == "" ? "" : "+") $17 }
    $3 > 0 {
      data++
      if ($6 !~ /iwarp_mpa/ && ($2 == ours || $8 == "")) bad("payload that is not iWARP")
      if ($2 == ours && ($8 != "" || $16 != "")) bad("our segment is not whole FPDUs")
      k = split($7, op, ","); for (i = 1; i <= k; i++) ops[substr(op[i], 4) + 0]++
    }
    END {
      split("Write,Read Request,Read Response,Send,Send Invalidate,Send SE,Send SE Invalidate,Terminate", name, ",")
      for (i = 0; i < 7; i++) if (ops[i]) sum = sum (sum ? ", " : "") ops[i] " " name[i + 1]
      for (i in again) if (ours == "" || justified(i)) late++; else { $1 = again[i]; $15 = "from " from[i]; bad("TCP retransmission") }
      for (w in n) { print w ": " n[w] " frames"; fail = 1 }
      if (data == 0) { print "no iWARP in the capture"; fail = 1 }
      if (!fail) print NR " frames, " conns / 2 " connections, MPA revision " revs ": " sum (late ? "; " late " sent again" : "")
      exit fail
    }' "$dir/frames" >"$dir/verdict"
  local status=$?

  tshark -r "$dir/one.pcap" -o tcp.try_heuristic_first:TRUE -V -O iwarp_mpa 2>/dev/null |
    awk '/ULPDU length:/ { fpdu++ } /Good CRC32/ { good++ } /Bad CRC32/ { wrong++ } END { print fpdu + 0, good + 0, wrong + 0 }' >"$dir/crc"
  read -r fpdu good wrong <"$dir/crc"
  if [ "$wrong" -gt 0 ]; then echo "wrong CRC in $wrong FPDUs"; status=1; fi
  if [ -n "$crc" ] && [ "$good" -ne "$fpdu" ]; then echo "$fpdu FPDUs, but only $good with a right CRC"; status=1; fi
  if [ "$status" -eq 0 ]; then echo "$(cat "$dir/verdict"); $fpdu FPDUs, $good CRCs right"; else cat "$dir/verdict"; fi
  rm -rf "$dir"
  return "$status"
}
