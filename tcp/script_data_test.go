package tcp

import (
	"testing"
	"time"
)

func TestScriptReceive(t *testing.T) {
	const sack = "mss 1000 sackok"
	slow := func(c *Config) { c.RcvWindow = 4000 }
	runScripts(t, []script{
		{name: "9293 3.8.6.3 ACKs come at once at first", text: `
			< P. 1+100 ack 1
			> . 1 ack 101`},
		{name: "SHLD-18 MUST-40 then after 40 ms", text: `
			quick
			< P. 1+100 ack 1
			+39ms
			+1ms
			> . 1 ack 101`},
		{name: "MUST-59 or with the second full segment", text: `
			< P. 1+1000 ack 1
			> . 1 ack 1001
			quick
			< P. 1001+1000 ack 1 x2
			> . 1 ack 3001
			< P. 3001+1000 ack 1
			+40ms
			> . 1 ack 4001`},
		{name: "SHLD-18 segments that have become smaller still count", text: `
			< P. 1+8000 ack 1
			> . 1 ack 8001
			quick
			< P. 8001+1000 ack 1 x2
			> . 1 ack 10001`},
		{name: "8985 7.2 of two small segments or more the first waits a millisecond at most", text: `
			quick
			< P. 1+100 ack 1
			< P. 101+100 ack 1
			+900us
			< P. 201+100 ack 1
			+100us
			> . 1 ack 301`},
		{name: "9293 3.8.6.3 an ACK rides on text", text: `
			quick
			< P. 1+100 ack 1
			push 50
			> P. 1+50 ack 101
			+1s
			> P. 1+50 re
			> P. 1+50 re`},
		{name: "5681 4.2 out of order: at once", opts: sack, text: `
			quick
			< P. 101+100 ack 1
			in hold 101+100
			> . 1 ack 1 sack 101-201
			< P. 1+100 ack 1
			in deliver 1+100
			held 101+100
			held none
			> . 1 ack 201 nosack`},
		{name: "5681 4.2 a gap that is filled in part: at once", opts: sack, text: `
			quick
			< P. 201+100 ack 1
			> . 1 ack 1 sack 201-301
			< P. 1+100 ack 1
			> . 1 ack 101 sack 201-301`},
		{name: "6675 ACKs for a block that only grows may wait for a twentieth of the RTT", opts: sack + " rtt 10ms", text: `
			quick
			< . 101+100 ack 1
			> . 1 ack 1 sack 101-201
			< . 201+100 ack 1
			> . 1 ack 1 sack 101-301
			< . 301+100 ack 1
			> . 1 ack 1 sack 101-401
			< . 401+100 ack 1 x2
			+499us
			+1us
			> . 1 ack 1 sack 101-601
			< . 701+100 ack 1
			> . 1 ack 1 sack 701-801 101-601
			< . 801+100 ack 1
			< . 1+100 ack 1
			> . 1 ack 601 sack 701-901
			< . 901+100 ack 1
			> . 1 ack 601 sack 701-1001`},
		{name: "6675 one ACK for sixteen segments of a block that grows, at least", opts: sack + " rtt 10ms", text: `
			quick
			< . 101+100 ack 1
			> . 1 ack 1 sack 101-201
			< . 201+100 ack 1
			> . 1 ack 1 sack 101-301
			< . 301+100 ack 1
			> . 1 ack 1 sack 101-401
			< . 401+100 ack 1 x13
			> . 1 ack 1 sack 101-1701`},
		{name: "2018 4 the block of the latest segment comes first", opts: sack, text: `
			< P. 101+100 ack 1
			> . 1 ack 1 sack 101-201
			< P. 301+100 ack 1
			> . 1 ack 1 sack 301-401 101-201
			< P. 501+100 ack 1
			> . 1 ack 1 sack 501-601 301-401 101-201
			< P. 201+100 ack 1
			> . 1 ack 1 sack 101-401 501-601`},
		{name: "2018 4 four blocks at most", opts: sack, text: `
			< P. 101+100 ack 1
			> . 1 ack 1
			< P. 301+100 ack 1
			> . 1 ack 1
			< P. 501+100 ack 1
			> . 1 ack 1
			< P. 701+100 ack 1
			> . 1 ack 1 sack 701-801 501-601 301-401 101-201
			< P. 901+100 ack 1
			> . 1 ack 1 sack 901-1001 701-801 301-401 501-601`},
		{name: "2018 3 three blocks with timestamps", opts: "mss 1000 sackok ts 1", conf: fullOptions, text: `
			< P. 101+100 ack 1
			> . 1 ack 1
			< P. 301+100 ack 1
			> . 1 ack 1
			< P. 501+100 ack 1
			> . 1 ack 1
			< P. 701+100 ack 1
			> . 1 ack 1 sack 701-801 501-601 301-401`},
		{name: "2018 4 SACK blocks leave a full record alone", opts: sack, text: `
			< P. 101+100 ack 1
			> . 1 ack 1 sack 101-201
			< P. 301+100 ack 1
			> . 1 ack 1 sack 301-401 101-201
			push 1000
			> P. 1+1000 ack 1 nosack`},
		{name: "2018 4 and go with a short one", opts: sack, text: `
			< P. 101+100 ack 1
			> . 1 ack 1
			push 900
			> P. 1+900 ack 1 sack 101-201`},
		{name: "2883 4.1 a duplicate is reported", opts: sack, text: `
			< P. 1+100 ack 1
			> . 1 ack 101
			< P. 1+100 ack 1
			in drop
			> . 1 ack 101 sack 1-101
			stat dsackout 1`},
		{name: "2883 4.1 a duplicate of what is held", opts: sack, text: `
			< P. 101+100 ack 1
			> . 1 ack 1 sack 101-201
			< P. 101+100 ack 1
			in drop
			> . 1 ack 1 sack 101-201 101-201
			stat dsackout 1`},
		{name: "2883 4 (3) the block after it is the one that it lies in", opts: sack, text: `
			< P. 101+100 ack 1
			> . 1 ack 1 sack 101-201
			< P. 301+100 ack 1
			> . 1 ack 1 sack 301-401 101-201
			< P. 501+100 ack 1
			> . 1 ack 1 sack 501-601 301-401 101-201
			< P. 101+100 ack 1
			> . 1 ack 1 sack 101-201 101-201 501-601 301-401`},
		{name: "2883 4.2 a segment that is old in part", opts: sack, text: `
			< P. 1+100 ack 1
			> . 1 ack 101
			< P. 51+100 ack 1
			in deliver 101+50
			> . 1 ack 151 sack 51-101`},
		{name: "9293 3.10.7.4 overlap: a longer segment takes the place of held ones", text: `
			< P. 201+100 ack 1
			in hold
			> . 1 ack 1
			< P. 101+300 ack 1
			in hold 101+300
			held drop
			> . 1 ack 1
			< P. 1+100 ack 1
			in deliver
			held 101+300
			held none
			> . 1 ack 401`},
		{name: "9293 3.10.7.4 overlap: what is covered is dropped", text: `
			< P. 101+300 ack 1
			in hold
			> . 1 ack 1
			< P. 201+100 ack 1
			in drop
			> . 1 ack 1
			held none`},
		{name: "9293 3.10.7.4 overlap: covered by two", text: `
			< P. 101+100 ack 1
			> . 1 ack 1
			< P. 201+100 ack 1
			> . 1 ack 1
			< P. 151+100 ack 1
			in drop
			> . 1 ack 1`},
		{name: "9293 3.10.7.4 overlap: each byte is delivered once", text: `
			< P. 101+100 ack 1
			> . 1 ack 1
			< P. 151+100 ack 1
			in hold
			> . 1 ack 1
			< P. 1+120 ack 1
			in deliver 1+120
			held 121+80
			held 201+50
			held none
			> . 1 ack 251`},
		{name: "9293 3.10.7.4 overlap: text in order reaches past what is held", text: `
			< P. 101+100 ack 1
			> . 1 ack 1
			< P. 1+300 ack 1
			in deliver 1+300
			held drop
			held none
			> . 1 ack 301`},
		{name: "5044 4.3 what is placed stays acknowledged", opts: sack, text: `
			< P. 101+100 ack 1
			in hold
			> . 1 ack 1
			placed
			< P. 201+100 ack 1
			in hold
			> . 1 ack 1 sack 101-301
			placed
			< P. 101+100 ack 1
			in drop
			> . 1 ack 1 sack 101-201 101-301
			< P. 1+100 ack 1
			in deliver 1+100
			held 101+200 nobuf
			held none
			> . 1 ack 301`},
		{name: "5044 4.3 text over what is placed", opts: sack, text: `
			< P. 201+100 ack 1
			in hold
			> . 1 ack 1
			placed
			< P. 101+300 ack 1
			in hold 101+100
			> . 1 ack 1
			< P. 301+100 ack 1
			in hold
			> . 1 ack 1
			< P. 1+100 ack 1
			held 101+100
			held 201+100 nobuf
			held 301+100
			held none
			> . 1 ack 401`},
		{name: "no more than MaxHeld segments are held", opts: sack, conf: func(c *Config) { c.MaxHeld = 2 }, text: `
			< P. 101+10 ack 1
			in hold
			> . 1 ack 1
			< P. 201+10 ack 1
			in hold
			> . 1 ack 1
			< P. 301+10 ack 1
			in drop
			> . 1 ack 1 sack 201-211 101-111
			stat helddropped 1
			< P. 1+100 ack 1
			in deliver
			held 101+10
			> . 1 ack 111`},
		{name: "2018 8 frames that are short are given back", opts: sack, text: `
			< P. 101+100 ack 1
			in hold
			> . 1 ack 1
			placed
			< P. 301+100 ack 1
			in hold
			> . 1 ack 1 sack 301-401 101-201
			reclaim
			held drop
			held none
			< P. 1+100 ack 1
			in deliver 1+100
			held 101+100 nobuf
			> . 1 ack 201 nosack
			< P. 201+200 ack 1
			in deliver 201+200
			> . 1 ack 401`},
		{name: "the window is no more than MaxHeld segments", conf: func(c *Config) { c.MaxHeld = 4 }, text: `
			dial
			> S 0 win 5840`},
		{name: "9293 3.8.6 text beyond the window is cut off", conf: slow, text: `
			< P. 1+5000 ack 1
			in deliver 1+4000
			> . 1 ack 4001`},
		{name: "9293 3.8.6 the backlog lessens the window", conf: slow, text: `
			backlog 3000
			< P. 1+3000 ack 1
			> . 1 ack 3001 win 1000`},
		{name: "SHLD-14 the window does not shrink", conf: slow, text: `
			< P. 1+100 ack 1
			> . 1 ack 101 win 4000
			backlog 3900
			< P. 101+100 ack 1
			> . 1 ack 201 win 3900`},
		{name: "MUST-39 the receiver's silly window is avoided", conf: slow, text: `
			backlog 2000
			< P. 1+1000 ack 1
			> . 1 ack 1001 win 3000
			backlog 4000
			< P. 1001+3000 ack 1
			> . 1 ack 4001 win 0
			backlog 3500
			backlog 3000
			backlog 2001
			backlog 2000
			> . 1 ack 4001 win 2000`},
		{name: "MUST-39 half of a window of less than two segments is enough", conf: func(c *Config) { c.RcvWindow = 2000 }, text: `
			backlog 1000
			< P. 1+1000 ack 1
			> . 1 ack 1001 win 1000
			backlog 2000
			< P. 1001+1000 ack 1
			> . 1 ack 2001 win 0
			backlog 1001
			backlog 1000
			> . 1 ack 2001 win 1000`},
		{name: "MUST-39 a full segment is enough for the edge to move", conf: func(c *Config) { c.RcvWindow = 5840 }, text: `
			backlog 5840
			< P. 1+1460 ack 1
			> . 1 ack 1461 win 4380
			< P. 1461+1460 ack 1
			> . 1 ack 2921 win 2920
			< P. 2921+1460 ack 1
			> . 1 ack 4381 win 1460
			< P. 4381+1460 ack 1
			> . 1 ack 5841 win 0
			backlog 4381
			< P. 5840+1 ack 1
			> . 1 ack 5841 win 0
			backlog 4380
			< P. 5840+1 ack 1
			> . 1 ack 5841 win 1460`},
		{name: "MUST-39 an edge that has not moved is offered as it was", conf: slow, text: `
			backlog 1000
			< P. 1+1000 ack 1
			> . 1 ack 1001 win 3000
			backlog 2000
			< P. 1001+1000 ack 1
			> . 1 ack 2001 win 2000
			backlog 1999
			< P. 1001+1000 ack 1
			> . 1 ack 2001 win 2000`},
		{name: "MUST-66 a zero window: ACKs and RST are taken", conf: slow, text: `
			send 1+100
			backlog 4000
			< P. 1+4000 ack 1
			> . 101 ack 4001 win 0
			< . 4001 ack 101
			released 1
			< R 4001
			state CLOSED`},
		{name: "9293 3.8.6.1 a probe of our zero window is answered", conf: slow, text: `
			backlog 4000
			< P. 1+4000 ack 1
			> . 1 ack 4001 win 0
			< P. 4001+1 ack 1
			in drop
			> . 1 ack 4001 win 0`},
		{name: "7323 2.2 no window is scaled for a peer without the option", conf: func(c *Config) {
			c.NoWindowScale, c.RcvWindow, c.MaxHeld = false, 1<<20, 100000
		}, text: `
			< P. 1+100 ack 1
			> . 1 ack 101 win 65535`},
		{name: "9293 3.10.7.4 a needless retransmission may carry a new ACK", text: `
			< P. 1+100 ack 1
			> . 1 ack 101
			send 1+100
			< P. 1+100 ack 101
			in drop
			> . 101 ack 101
			released 2`},
		{name: "7323 2.4 the window is scaled", opts: "mss 1000 ws 0", conf: func(c *Config) { c.NoWindowScale, c.RcvWindow, c.MaxHeld = false, 1<<20, 100000 }, text: `
			< P. 1+10 ack 1
			> . 1 ack 11 win 32768`},
		{name: "9293 3.8.5 urgent text is delivered in line", text: `
			< PU. 1+100 ack 1
			in deliver 1+100
			> . 1 ack 101
			< PU. 101+100 ack 1
			in deliver 101+100
			> . 1 ack 201`},
		{name: "7323 5.3 R1 an old timestamp is dropped and answered", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			< P. 1+100 ack 1 ts 2000
			> . 1 ack 101 ts ecr 2000
			< P. 101+100 ack 1 tsold 1999
			in drop
			> . 1 ack 101 ts ecr 2000
			stat paws 1
			< P. 101+100 ack 1 ts 2000
			in deliver
			> . 1 ack 201`},
		{name: "7323 5.3 the timestamp wraps", opts: "mss 1000 ts 0xfffffff0", conf: fullOptions, text: `
			< P. 1+100 ack 1 ts 5
			in deliver
			> . 1 ack 101 ecr 5
			< P. 101+100 ack 1 tsold 0xfffffff8
			in drop
			> . 1 ack 101`},
		{name: "7323 5.3 PAWS does not apply to RST", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			< R 1 tsold 1
			state CLOSED`},
		{name: "7323 5.5 an old connection's clock has expired", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			+577h
			< P. 1+100 ack 1 ts 1
			in deliver
			> . 1 ack 101 ecr 1`},
		{name: "7323 3.2 a segment without timestamps is dropped", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			< P. 1+100 ack 1 nots
			in drop
			state ESTABLISHED`},
		{name: "7323 3.2 but not a RST", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			< R 1 nots
			state CLOSED`},
		{name: "5961 4.2 nor a SYN of a peer that has restarted without timestamps", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			< S 77777 nots
			> . 1 ack 1
			state ESTABLISHED
			stat challenge 1`},
		{name: "5961 4.2 nor one with text, whatever its sequence number", opts: "mss 1000 ts 1000 sackok", conf: fullOptions, text: `
			< S 4000000000+100 nots
			> . 1 ack 1
			< S 4000000000+100 nots
			> . 1 ack 1
			state ESTABLISHED
			stat challenge 2`},
		{name: "7323 4.3 the echo is of the segment that moved the edge", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			quick
			< P. 1+10 ack 1 ts 1001
			< P. 11+10 ack 1 ts 1002
			+40ms
			> . 1 ack 21 ecr 1001`},
		{name: "7323 4.3 not of one out of order", opts: "mss 1000 ts 1000", conf: fullOptions, text: `
			< P. 101+10 ack 1 ts 1005
			> . 1 ack 1 ecr 1000`},
		{name: "9293 3.4 sequence numbers of the peer wrap", opts: "mss 1000 sackok peer 0xffffff80", text: `
			< P. 101+100 ack 1
			in hold 101+100
			> . 1 ack 1 sack 101-201
			< P. 1+100 ack 1
			in deliver 1+100
			held 101+100
			> . 1 ack 201`},
	})
}

func TestScriptSend(t *testing.T) {
	reno := func(c *Config) { c.CongestionControl = NewReno }
	keep := func(c *Config) {
		c.KeepAliveIdle, c.KeepAliveInterval, c.KeepAliveCount = 10*time.Second, time.Second, 2
	}
	runScripts(t, []script{
		{name: "9293 3.8.6.1 MUST-36 a closed window is probed", opts: "mss 1000 win 0", text: `
			room 1000
			push 500
			room -500
			+199ms
			+2ms
			> . 1+1 buf 1
			< . 1 ack 1 win 0
			+401ms
			> . 1+1
			< . 1 ack 1 win 0
			+801ms
			> . 1+1
			< . 1 ack 1 win 1000
			> P. 1+500 new
			stat probes 3
			stat retransmits 0`},
		{name: "MUST-37 an answered probe keeps the connection", opts: "mss 1000 win 0", conf: func(c *Config) { c.DataTimeout, c.MaxRTO = 2*time.Second, time.Second }, text: `
			push 500
			+201ms
			> . 1+1
			< . 1 ack 1 win 0
			+401ms
			> . 1+1
			< . 1 ack 1 win 0
			+801ms
			> . 1+1
			< . 1 ack 1 win 0
			+1s
			> . 1+1
			< . 1 ack 1 win 0
			+1s
			> . 1+1
			+999ms
			> . 1+1
			+2ms
			> R. 1
			err timed out`},
		{name: "SHLD-16 also if it was closed for longer than R2", opts: "mss 1000", conf: func(c *Config) { c.DataTimeout = 2 * time.Second }, text: `
			send 1+1000
			< . 1 ack 1 win 0
			+201ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			+401ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			+801ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			+1601ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			< . 1 ack 1 win 5000
			+1ms
			> P. 1+1000 re
			< . 1 ack 1001 win 5000
			deadline none`},
		{name: "SHLD-16 what a closed window dropped is sent again when it opens", opts: "mss 1000", text: `
			send 1+1000
			< . 1 ack 1 win 0
			+201ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			+401ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			+801ms
			> P. 1+1000 re
			< . 1 ack 1 win 0
			< . 1 ack 1 win 5000
			+1ms
			> P. 1+1000 re
			< . 1 ack 1001 win 5000
			deadline none`},
		{name: "SHLD-11 R2 ends a wait for a silent peer's window at once", opts: "mss 1000 win 0", conf: func(c *Config) { c.DataTimeout = 2 * time.Second }, text: `
			push 500
			+201ms
			> . 1+1
			+401ms
			> . 1+1
			+801ms
			> . 1+1
			+598ms
			> R. 1
			err timed out`},
		{name: "9293 3.10.7.4 an ACK and a RST lie in the peer's window while that is probed", opts: "mss 1000 win 0", text: `
			push 500
			+201ms
			> . 1+1
			< P. 1+100 ack 1 win 0
			> . 1 ack 101
			abort
			> R. 1 ack 101`},
		{name: "9293 3.10.7.4 the end of the window may move back by what its scale rounds off", opts: "mss 1000 ws 7 win 2000", conf: func(c *Config) { c.NoWindowScale = false }, text: `
			send 1+1000 x2
			< P. 1+100 ack 1001 win 7
			> . 2001 ack 101
			< P. 101+100 ack 1001 win 6
			> . 1769 ack 201`},
		{name: "9293 3.8.6.1 the byte of a probe is taken", opts: "mss 1000 win 0", text: `
			push 500
			+201ms
			> . 1+1
			< . 1 ack 2 win 1000
			> P. 2+499 new
			< . 1 ack 501
			released 1`},
		{name: "9293 3.8.6.1 the byte of a probe is taken, and the window stays shut", opts: "mss 1000 win 0", text: `
			push 500
			+201ms
			> . 1+1
			< . 1 ack 2 win 0
			+401ms
			> . 2+1
			< . 1 ack 2 win 1000
			> P. 2+499 new
			< . 1 ack 501
			released 1
			deadline none`},
		{name: "9293 3.8.6.1 the byte of a probe is taken, and the window is one byte", opts: "mss 1000 win 0", text: `
			push 500
			+201ms
			> . 1+1
			< . 1 ack 2 win 1
			> P. 2+1 new
			< . 1 ack 3 win 1000
			> P. 3+498
			< . 1 ack 501
			released 1`},
		{name: "9293 3.8.6.1 the byte of a probe was the whole record", opts: "mss 1000 win 0", text: `
			push 1
			close
			+201ms
			> . 1+1
			< . 1 ack 2 win 0
			released 1
			> F. 2
			< . 1 ack 3 win 0
			state FIN-WAIT-2`},
		{name: "9293 3.8.6.1 the window closes while text is in flight", opts: "mss 1000 win 1000", text: `
			push 1000 500
			> P. 1+1000
			< . 1 ack 1001 win 0
			+201ms
			> . 1001+1
			< . 1 ack 1001 win 2000
			> P. 1001+500`},
		{name: "9293 3.8.6.1 a lost window update is made good by the probe", opts: "mss 1000 win 0", text: `
			push 500
			+201ms
			> . 1+1
			< . 1 ack 1 win 4000
			> P. 1+500`},
		{name: "9293 3.8.6.1 only the FIN waits", opts: "mss 1000 win 500", text: `
			send 1+500
			< . 1 ack 501 win 0
			close
			> F. 501`},
		{name: "9293 3.8.6 MUST-34 the window shrinks below what is in flight", opts: "mss 1000 win 3000", text: `
			send 1+1000 x3
			< . 1 ack 1001 win 500
			push 100
			+203ms
			> P. 1001+1000 re
			< . 1 ack 3001 win 500
			> P. 3001+100`},
		{name: "MUST-38 the sender's silly window: half of the largest", opts: "mss 1000 win 600", text: `
			push 1000
			> P. 1+600 buf 1 off 0
			< . 1 ack 601 win 600
			> P. 601+400 buf 1 off 600
			released none
			< . 1 ack 1001
			released 1`},
		{name: "MUST-38 less than half has to wait for the override", opts: "mss 1000 win 3000", text: `
			send 1+1000 x3
			< . 1 ack 3001 win 300
			push 1000
			+199ms
			+3ms
			> P. 3001+300 buf 4
			< . 1 ack 3301 win 3000
			> P. 3301+700 buf 4 off 300`},
		{name: "9293 3.8.6.2.1 what is smaller than the window leaves at once", opts: "mss 1000 win 3000", text: `
			send 1+1000 x3
			< . 1 ack 3001 win 300
			send 3001+300`},
		{name: "MUST-17 no Nagle: small records leave at once", opts: "mss 1000", text: `
			push 10 20 30
			> P. 1+10 buf 1
			> P. 11+20 buf 2
			> P. 31+30 buf 3`},
		{name: "5681 3.1 slow start by bytes acknowledged", opts: "mss 1000", conf: reno, text: `
			send 1+1000 x10
			room 0
			< . 1 ack 2001
			cwnd 12000
			room 4000`},
		{name: "9293 3.10.7.4 an older segment does not move the window", opts: "mss 1000", text: `
			< P. 1+10 ack 1 win 4000
			> . 1 ack 11
			< P. 11+10 ack 1 win 2000
			> . 1 ack 21
			< P. 1+10 ack 1 win 9000
			> . 1 ack 21
			send 1+1000
			room 1000`},
		{name: "9293 3.10.7.4 window update by an ACK of nothing new", opts: "mss 1000 win 1000", text: `
			send 1+1000
			room 0
			< . 1 ack 1 win 3000
			room 2000`},
		{name: "MUST-25 no keep-alive by default", text: `
			deadline none`},
		{name: "9293 3.8.4 keep-alive", conf: keep, text: `
			+9999ms
			+1ms
			> . 0 ack 1
			< . 1 ack 1
			+9s
			+1s
			> . 0 ack 1
			+1s
			> . 0 ack 1
			+1s
			> R. 1 ack 1
			err timed out`},
		{name: "9293 3.8.4 keep-alive waits while there is traffic", conf: keep, text: `
			+8s
			< P. 1+10 ack 1
			> . 1 ack 11
			+9999ms
			+1ms
			> . 0 ack 11`},
		{name: "9293 3.8.4 a keep-alive is answered", text: `
			< . 0 ack 1
			> . 1 ack 1
			< . 0+1 ack 1
			> . 1 ack 1`},
		{name: "1191 6.3 a lower path MTU cuts records in flight", opts: "mss 1460", text: `
			send 1+1460 x2
			icmp toobig 1 1000
			mss 960
			> P. 1+960 re buf 1 off 0
			> P. 961+500 re buf 1 off 960
			> P. 1461+960 re buf 2 off 0
			> P. 2421+500 re buf 2 off 960
			cwnd 14600
			< . 1 ack 2921
			released 1 2
			stat shrinks 1
			send 2921+960`},
		{name: "1191 6.5 pieces that fit a still lower path MTU are not lost", opts: "mss 1460", text: `
			send 1+1460
			send 1461+1460
			icmp toobig 1 1000
			> P. 1+960 re
			> P. 961+500 re
			> P. 1461+960 re
			> P. 2421+500 re
			icmp toobig 1461 900
			mss 860
			> P. 1+860 re
			> P. 861+100 re
			> P. 1461+860 re
			> P. 2321+100 re`},
		{name: "5927 4.1 ICMP about what is not in flight is ignored", opts: "mss 1460", text: `
			send 1+1460
			icmp toobig 1461 1000
			icmp toobig 0 1000
			icmp toobig -5000 1000
			mss 1460
			< . 1 ack 1461
			icmp toobig 1 1000
			mss 1460`},
		{name: "5927 7.2 ICMP for a packet that was not too big is ignored", opts: "mss 1460", text: `
			send 1+500
			icmp toobig 1 1000
			mss 1460`},
		{name: "5927 7.2 an absurd MTU is raised to the least", opts: "mss 1460", text: `
			send 1+1460
			icmp toobig 1 68
			mss 512
			> P. 1+512 re x2
			> P. 1025+436 re`},
		{name: "1191 5 a router that does not say the MTU", opts: "mss 1460", text: `
			send 1+1460
			icmp toobig 1 0
			mss 1452
			> P. 1+1452 re
			> P. 1453+8 re`},
		{name: "1191 6.3 the path MTU is tried again after 10 minutes", opts: "mss 1460", text: `
			send 1+1460
			icmp toobig 1 1000
			> P. 1+960 re
			> P. 961+500 re
			< . 1 ack 1461
			+599s
			mss 960
			+1s
			mss 1460`},
		{name: "4821 7.7 a black hole is found by time-outs", opts: "mss 1460", text: `
			send 1+1460
			+201ms
			> P. 1+1460 re
			+401ms
			> P. 1+1460 re
			+801ms
			> P. 1+1360 re
			mss 1360
			+801ms
			> P. 1+1240 re
			mss 1240
			+801ms
			> P. 1+1044 re
			+801ms
			> P. 1+1044 re
			< . 1 ack 1461
			released 1`},
		{name: "4821 7.7 a size that got through before is tried again soon", opts: "mss 1460", text: `
			send 1+1460
			< . 1 ack 1461
			send 1461+1460
			+201ms
			> P. 1461+1460 re
			+401ms
			> P. 1461+1460 re
			+801ms
			> P. 1461+1360 re
			< . 1 ack 2921
			+9s
			mss 1360
			+1s
			mss 1460
			push 1460        # but if it does not get through then, later
			> P. 2921+1460
			+801ms
			> P. 2921+1460 re
			+1601ms
			> P. 2921+1460 re
			+3201ms
			> P. 2921+1360 re
			< . 1 ack 4281
			> P. 4281+100 re
			< . 1 ack 4381
			+599s
			mss 1360
			+1s
			mss 1460`},
		{name: "4821 7.7 not while nothing gets through", opts: "mss 1460", text: `
			send 1+1460
			< . 1 ack 1461
			send 1461+1460
			+201ms
			> P. 1461+1460 re
			+401ms
			> P. 1461+1460 re
			+801ms
			> P. 1461+1360 re
			+801ms
			> P. 1461+1240 re
			+801ms
			> P. 1461+1044 re
			+801ms
			> P. 1461+1044 re
			+1601ms
			> P. 1461+1044 re
			+3201ms
			> P. 1461+1044 re
			+6391ms
			mss 1044
			+2ms
			> P. 1461+1044 re
			< . 1 ack 2921
			+7998ms
			mss 1044
			+2ms
			mss 1460`},
		{name: "1122 3.3.1.4 what has timed out is sent at once by another next hop", text: `
			send 1+100
			path
			+201ms
			> P. 1+100 re
			+401ms
			> P. 1+100 re
			path
			> P. 1+100 re
			+401ms
			> P. 1+100 re
			< . 1 ack 101
			path
			deadline none`},
		{name: "1122 3.3.1.4 so is a window probe", opts: "mss 1000 win 0", text: `
			push 500
			path
			+201ms
			> . 1+1
			+401ms
			> . 1+1
			path
			> . 1+1
			+401ms
			> . 1+1`},
		{name: "1122 3.3.1.4 so is a SYN", text: `
			dial
			> S 0
			+1s
			> S 0
			path
			> S 0
			+2s
			> S 0`},
		{name: "9293 3.7.1 the link's MTU changes", opts: "mss 1460", text: `
			mtu 1280
			mss 1240
			mtu 1500
			mss 1460`},
		{name: "MUST-54 a soft ICMP error does not end a connection", opts: "mss 1460", text: `
			send 1+100
			icmp unreachable 1 0
			icmp unreachable 1 3
			state ESTABLISHED`},
		{name: "SHLD-25 but it is named when nothing gets through", opts: "mss 1460", conf: func(c *Config) { c.DataTimeout = 500 * time.Millisecond }, text: `
			send 1+100
			icmp unreachable 1 0
			+201ms
			> P. 1+100 re
			+299ms
			> R. 101
			err unreachable`},
		{name: "MUST-65 the MSS option is in no segment but SYN", opts: "mss 1460", text: `
			push 100
			> P. 1+100 mss 0 nows nosackok`},
		{name: "9293 3.9.2.2 a hard ICMP error refuses an open", text: `
			dial
			> S 0
			icmp unreachable 0 3
			state CLOSED
			err refused`},
		{name: "9293 3.9.2.2 a hard ICMP error ends an open that is prohibited", text: `
			dial
			> S 0
			icmp unreachable 0 13
			state CLOSED
			err unreachable`},
		{name: "9293 3.9.2.2 a soft one does not, until the second retransmission", text: `
			dial
			> S 0
			icmp unreachable 0 1
			icmp exceeded 0 0
			state SYN-SENT
			+1s
			> S 0
			icmp unreachable 0 1
			icmp exceeded 0 3
			state SYN-SENT
			+2s
			> S 0
			icmp unreachable 1 1
			state SYN-SENT
			icmp unreachable 0 1
			state CLOSED
			err unreachable
			event closed
			deadline none`},
		{name: "9293 3.9.2.2 so does a routing loop", text: `
			dial
			> S 0
			+1s
			> S 0
			+2s
			> S 0
			icmp exceeded 0 0
			state CLOSED
			err unreachable`},
		{name: "9293 3.9.2.2 but not that of a peer", text: `
			listen
			< S 0
			> S. 0 ack 1
			+1s
			> S. 0 ack 1
			+2s
			> S. 0 ack 1
			icmp unreachable 0 1
			icmp unreachable 0 3
			state SYN-RECEIVED`},
		{name: "5927 4.1 nor one about another SYN", text: `
			dial
			> S 0
			icmp unreachable 1 3
			state SYN-SENT`},
	})
}
