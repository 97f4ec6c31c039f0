package tcp

import "testing"

func fullOptions(c *Config) { c.NoTimestamps, c.NoWindowScale, c.RcvWindow = false, false, 2<<20 }

func withECN(c *Config) { c.ECN = RequestECN }

func TestScriptHandshake(t *testing.T) {
	runScripts(t, []script{
		{name: "9293 3.5 figure 6 active open", text: `
			dial
			> S 0 mss 1460 nows nots sackok win 65535
			state SYN-SENT
			event none
			< S. 0 ack 1 mss 1000
			> . 1 ack 1
			state ESTABLISHED
			event established
			mss 1000`},
		{name: "9293 3.5 figure 6 passive open", text: `
			listen
			< S 0 mss 1460
			> S. 0 ack 1 mss 1460 nows nots nosackok
			state SYN-RECEIVED
			< . 1 ack 1
			state ESTABLISHED
			event established`},
		{name: "9293 3.5 figure 7 simultaneous open", text: `
			dial
			> S 0
			< S 0 mss 1460
			> S. 0 ack 1
			state SYN-RECEIVED
			< S. 0 ack 1 mss 1460
			state ESTABLISHED
			event established`},
		{name: "MUST-10 simultaneous open, by an ACK", text: `
			dial
			> S 0
			< S 0 mss 1460
			> S. 0 ack 1
			< . 1 ack 1
			state ESTABLISHED`},
		{name: "MUST-10 simultaneous open, our SYN was lost", text: `
			dial
			> S 0
			< S 0 mss 1460
			> S. 0 ack 1
			+1s
			> S. 0 ack 1 re
			< . 1 ack 1
			state ESTABLISHED`},
		{name: "9293 3.5 figure 8 old duplicate SYN", text: `
			listen
			< S -1000 mss 1460
			> S. 0 absack 0x1ffffc19
			< R -999
			state CLOSED
			err refused`},
		{name: "MUST-15 no MSS option means 536", opts: "noopts", text: `
			mss 536`},
		{name: "MUST-16 the MSS option of the peer is a limit", opts: "mss 700", text: `
			accept
			mss 700
			send 1+700`},
		{name: "MUST-16 the MTU is a limit too", opts: "mss 9000", text: `
			mss 1460`},
		{name: "6691 2 timestamps lessen the MSS", opts: "mss 1460 ts 1", conf: fullOptions, text: `
			mss 1448`},
		{name: "7323 1.3 every option in the SYN", conf: fullOptions, text: `
			dial
			> S 0 mss 1460 ws 5 sackok ts ecr 0 win 65535
			< S. 0 ack 1 mss 1460 ws 7 sackok ts 77
			> . 1 ack 1 ts ecr 77 win 46720`},
		{name: "7323 2.2 options are answered, not offered, in a SYN-ACK", conf: fullOptions, text: `
			listen
			< S 0 mss 1460 ws 7 sackok ts 77
			> S. 0 ack 1 ws 5 sackok ts ecr 77 win 65535`},
		{name: "7323 4.3 an answer to a SYN that was sent again echoes the timestamp of that one", conf: fullOptions, text: `
			listen
			< S 0 mss 1460 ts 77
			> S. 0 ack 1 ts ecr 77
			+500ms
			< S 0 mss 1460 ts 1077
			> S. 0 ack 1 ts ecr 1077
			< S 0 mss 1460 tsold 577
			> S. 0 ack 1 ts ecr 1077`},
		{name: "7323 2.2 no window scale offered", conf: fullOptions, text: `
			listen
			< S 0 mss 1460 sackok
			> S. 0 ack 1 nows sackok nots win 65535
			< . 1 ack 1 win 1000
			room 1460
			send 1+1000
			room 0`},
		{name: "7323 2.2 window in a SYN is not scaled", opts: "mss 1460 ws 7 win 1000", conf: fullOptions, text: `
			send 1+1000
			room 0
			< . 1 ack 1001 win 10
			send 1001+1280
			room 0`},
		{name: "7323 2.2 nor in that of a simultaneous open", conf: fullOptions, text: `
			dial
			> S 0
			< S 0 mss 1460 ws 7 win 1000
			> S. 0 ack 1
			< S. 0 ack 1 mss 1460 ws 7 win 1000
			state ESTABLISHED
			send 1+1000
			room 0`},
		{name: "7323 2.3 a shift above 14 is 14", opts: "mss 1460 ws 15", conf: fullOptions, text: `
			send 1+100
			< . 1 ack 101 win 1
			send 101+1460
			room 13140`},
		{name: "2018 2 no SACK unless permitted", opts: "mss 1460", text: `
			< P. 101+100 ack 1
			> . 1 ack 1 nosack`},
		{name: "6298 2.1 the SYN is sent again after 1 s, backed off", text: `
			dial
			> S 0 new
			+999ms
			+1ms
			> S 0 re mss 1460
			+1999ms
			+1ms
			> S 0 re
			+4s
			> S 0 re`},
		{name: "MUST-23 a SYN is given up after 3 minutes", text: `
			dial
			> S 0
			+1s
			> S 0
			+2s
			> S 0
			+4s
			> S 0
			+8s
			> S 0
			+16s
			> S 0
			+32s
			> S 0
			+60s
			> S 0
			+56999ms
			state SYN-SENT
			+1ms
			state CLOSED
			err timed out
			event closed
			deadline none`},
		{name: "MUST-23 a SYN-ACK is given up, with a RST", conf: func(c *Config) { c.SynTimeout = 3e9 }, text: `
			listen
			< S 0
			> S. 0 ack 1
			+1s
			> S. 0 ack 1 re
			+2s
			> R. 1 ack 1
			state CLOSED
			err timed out`},
		{name: "6298 5.7 the RTO is 3 s after a SYN was lost", opts: "mss 1460", text: `
			dial
			> S 0
			+1s
			> S 0 re
			< S. 0 ack 1 mss 1460
			> . 1 ack 1
			send 1+100
			+2999ms
			+1ms
			> P. 1+100 re`},
		{name: "5681 3.1 IW is one segment when SYN was lost twice", text: `
			dial
			> S 0
			+1s
			> S 0 re
			+2s
			> S 0 re
			< S. 0 ack 1 mss 1460
			> . 1 ack 1
			cwnd 1460`},
		{name: "6928 2 IW is ten segments", opts: "mss 1460", text: `
			cwnd 14600`},
		{name: "6928 2 IW of long segments", opts: "mss 1000", text: `
			cwnd 10000`},
		{name: "9293 3.10.7.3 SYN-ACK for what was not sent", text: `
			dial
			> S 0
			< S. 0 ack 2
			> R 2
			state SYN-SENT`},
		{name: "9293 3.10.7.3 ACK for what was not sent", text: `
			dial
			> S 0
			< . 0 ack 0
			> R 0
			state SYN-SENT`},
		{name: "9293 3.10.7.3 an ACK alone does nothing", text: `
			dial
			> S 0
			< . 0 ack 1
			state SYN-SENT`},
		{name: "9293 3.10.7.3 neither SYN nor RST nor ACK", text: `
			dial
			> S 0
			< P 0+10
			in drop
			state SYN-SENT`},
		{name: "9293 3.10.7.3 RST with our ACK refuses", text: `
			dial
			> S 0
			< R. 0 ack 1
			state CLOSED
			err refused
			event closed`},
		{name: "9293 3.10.7.3 RST without ACK is ignored", text: `
			dial
			> S 0
			< R 0
			state SYN-SENT`},
		{name: "5961 3 RST with a wrong ACK is ignored in SYN-SENT", text: `
			dial
			> S 0
			< R. 0 ack 2
			state SYN-SENT`},
		{name: "9293 3.10.7.3 text in a SYN-ACK is delivered", text: `
			dial
			> S 0
			< S. 0+10 ack 1 mss 1460
			in deliver 1+10
			> . 1 ack 11`},
		{name: "9293 3.10.7.4 a second SYN gets a second SYN-ACK", text: `
			listen
			< S 0
			> S. 0 ack 1
			< S 0
			> S. 0 ack 1
			state SYN-RECEIVED`},
		{name: "6298 3 nor is a SYN-ACK that answers a second SYN timed", text: `
			listen
			< S 0 mss 1460
			> S. 0 ack 1
			+900ms
			< S 0 mss 1460
			> S. 0 ack 1
			+10ms
			< . 1 ack 1
			stat rtoms 1000`},
		{name: "9293 3.8.1 the SYN-ACK is sent again", text: `
			listen
			< S 0
			> S. 0 ack 1 new
			+1s
			> S. 0 ack 1 re
			+2s
			> S. 0 ack 1 re
			< . 1 ack 1
			state ESTABLISHED`},
		{name: "MUST-13 SYN-RECEIVED, RST at the exact number", text: `
			listen
			< S 0
			> S. 0 ack 1
			< R 1
			state CLOSED
			err refused`},
		{name: "5961 3.2 SYN-RECEIVED, RST in the window", text: `
			listen
			< S 0
			> S. 0 ack 1
			< R 100
			> . 1 ack 1
			state SYN-RECEIVED`},
		{name: "9293 3.10.7.4 SYN-RECEIVED, RST outside of the window", text: `
			listen
			< S 0
			> S. 0 ack 1
			< R 0
			< R 70000
			state SYN-RECEIVED`},
		{name: "9293 3.10.7.4 SYN-RECEIVED, ACK for what was not sent", text: `
			listen
			< S 0
			> S. 0 ack 1
			< . 1 ack 2
			> R 2
			< . 1 ack 0
			> R 0
			state SYN-RECEIVED`},
		{name: "5961 4.2 SYN-RECEIVED, SYN in the window", text: `
			listen
			< S 0
			> S. 0 ack 1
			< S 100
			> . 1 ack 1
			state SYN-RECEIVED`},
		{name: "9293 3.10.7.4 SYN-RECEIVED, text with the ACK", text: `
			listen
			< S 0 mss 1460
			> S. 0 ack 1
			< P. 1+100 ack 1
			in deliver 1+100
			> . 1 ack 101
			state ESTABLISHED`},
		{name: "9293 3.10.7.4 SYN-RECEIVED, FIN with the ACK", text: `
			listen
			< S 0 mss 1460
			> S. 0 ack 1
			< F. 1 ack 1
			> . 1 ack 2
			state CLOSE-WAIT
			event established
			event peer-closed`},
		{name: "9293 3.10.4 CLOSE in SYN-SENT", text: `
			dial
			> S 0
			close
			state CLOSED
			err none
			event closed
			deadline none`},
		{name: "9293 3.10.4 CLOSE in SYN-RECEIVED", text: `
			listen
			< S 0 mss 1460
			> S. 0 ack 1
			close
			< . 1 ack 1
			> F. 1 ack 1
			state FIN-WAIT-1`},
		{name: "9293 3.10.5 ABORT in SYN-SENT", text: `
			dial
			> S 0
			abort
			state CLOSED
			err aborted`},
		{name: "9293 3.10.5 ABORT in SYN-RECEIVED", text: `
			listen
			< S 0
			> S. 0 ack 1
			abort
			> R. 1 ack 1
			state CLOSED`},
		{name: "9293 3.10.2 SEND before ESTABLISHED waits", text: `
			dial
			> S 0
			push 100 50
			< S. 0 ack 1 mss 1460
			> P. 1+100 ack 1
			> P. 101+50 ack 1
			state ESTABLISHED`},
		{name: "9293 3.10.2 a record longer than the MSS that comes out", text: `
			dial
			> S 0
			push 1000
			< S. 0 ack 1
			> P. 1+536 buf 1 off 0
			> P. 537+464 buf 1 off 536
			< . 1 ack 1001
			released 1`},
		{name: "9293 3.10.4 what waits in SYN-SENT is given back", text: `
			dial
			> S 0
			push 100 50
			close
			state CLOSED
			released 1 2`},
		{name: "3168 6.1.1 ECN is asked for and granted", conf: withECN, text: `
			dial
			> SEC 0
			< SE. 0 ack 1 mss 1460
			> . 1 ack 1
			push 100
			> P. 1+100 ect`},
		{name: "3168 6.1.1 ECN is not granted", conf: withECN, text: `
			dial
			> SEC 0
			< S. 0 ack 1 mss 1460
			> . 1 ack 1
			push 100
			> P. 1+100 noect`},
		{name: "3168 6.1.1 an answer that only mirrors the flags", conf: withECN, text: `
			dial
			> SEC 0
			< SEC. 0 ack 1 mss 1460
			> . 1 ack 1
			push 100
			> P. 1+100 noect`},
		{name: "3168 6.1.1.1 a SYN sent again does not ask for ECN", conf: withECN, text: `
			dial
			> SEC 0
			+1s
			> S 0 re
			< SE. 0 ack 1 mss 1460
			> . 1 ack 1
			push 100
			> P. 1+100 noect`},
		{name: "3168 6.1.1 but an answer to the first one commits to ECN as a receiver", conf: withECN, text: `
			dial
			> SEC 0
			+1s
			> S 0 re
			< SE. 0 ack 1 mss 1460
			> . 1 ack 1
			< P. 1+10 ack 1 ce
			> E. 1 ack 11
			< CP. 11+10 ack 1 ect
			> . 1 ack 21`},
		{name: "3168 6.1.1 ECN is granted", conf: withECN, text: `
			listen
			< SEC 0 mss 1460
			> SE. 0 ack 1
			< . 1 ack 1
			push 100
			> P. 1+100 ect`},
		{name: "3168 6.1.1 ECN is granted by default, but not asked for", text: `
			listen
			< SEC 0 mss 1460
			> SE. 0 ack 1
			< . 1 ack 1
			push 100
			> P. 1+100 ect`},
		{name: "3168 6.1.1 an answer that grants what was not asked for", text: `
			dial
			> S 0
			< SE. 0 ack 1 mss 1460
			> . 1 ack 1
			push 100
			> P. 1+100 noect`},
		{name: "3168 6.1.1 ECN is not granted when off", conf: func(c *Config) { c.ECN = NoECN }, text: `
			listen
			< SEC 0 mss 1460
			> S. 0 ack 1
			< . 1 ack 1
			push 100
			> P. 1+100 noect`},
		{name: "9293 3.10.7.2 LISTEN, RST is ignored", text: `
			listen
			< R 0`},
		{name: "9293 3.10.7.2 LISTEN, an ACK gets a RST", text: `
			listen
			< . 1 ack 100
			> R 100`},
		{name: "9293 3.10.7.2 LISTEN, SYN and ACK get a RST", text: `
			listen
			< S. 0 ack 100
			> R 100`},
		{name: "9293 3.10.7.2 LISTEN, text without SYN is ignored", text: `
			listen
			< P 0+10`},
		{name: "9293 3.10.7.1 CLOSED, no RST for a RST", text: `
			< R. 0 ack 1`},
		{name: "9293 3.10.7.1 CLOSED, RST for a SYN", text: `
			closed
			< S 0
			> R. 0 ack 1`},
		{name: "9293 3.10.7.1 CLOSED, RST for text", text: `
			closed
			< P. 5+10 ack 77
			> R 77`},
		{name: "9293 3.10.7.1 CLOSED, RST for FIN without ACK", text: `
			closed
			< F 5+10
			> R. 0 ack 16`},
		{name: "4987 3.6 a full queue gives a cookie", text: `
			listen 1
			< S 0 mss 1460
			> S. 0 ack 1
			state SYN-RECEIVED`},
		{name: "MUST-8 sequence numbers wrap in the handshake", opts: "mss 1460 iss 0xffffffff peer 0xffffffff", text: `
			push 100
			> P. 1+100 ack 1
			< P. 1+100 ack 101
			in deliver 1+100
			> . 101 ack 101
			released 1`},
	})
}
