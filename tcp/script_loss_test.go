package tcp

import (
	"testing"
	"time"
)

func TestScriptLoss(t *testing.T) {
	const sack = "mss 1000 sackok"
	tsSack := "mss 1012 sackok ts 1000"
	ts := func(c *Config) { c.NoTimestamps = false }
	reno := func(c *Config) { c.CongestionControl = NewReno }
	runScripts(t, []script{
		{name: "6298 5.1 5.4 5.5 the RTO doubles", opts: "mss 1000", text: `
			push 1000
			> P. 1+1000 new
			+199ms
			+2ms
			> P. 1+1000 re buf 1 off 0
			+399ms
			+2ms
			> P. 1+1000 re
			+798ms
			+2ms
			> P. 1+1000 re
			< . 1 ack 1001
			released 1
			stat timeouts 3
			deadline none`},
		{name: "6298 5.3 an ACK of new data restarts the timer", opts: "mss 1000", text: `
			send 1+1000 x2
			+150ms
			< . 1 ack 1001
			+199ms
			< . 1 ack 2001
			deadline none
			stat timeouts 0`},
		{name: "6298 3 Karn: a segment sent twice is not timed, 5.5: so that the back-off stays", opts: "mss 1000", text: `
			send 1+1000
			+201ms
			> P. 1+1000 re
			+300ms
			< . 1 ack 1001
			send 1001+1000
			+399ms
			+2ms
			> P. 1001+1000 re
			+200ms
			< . 1 ack 2001
			send 2001+1000
			+601ms
			< . 1 ack 3001
			stat timeouts 2
			stat rtoms 676`},
		{name: "6298 3 nor is what its ACK acknowledges after it", opts: "mss 1000", text: `
			send 1+1000 x2
			+201ms
			> P. 1+1000 re
			+300ms
			< . 1 ack 2001
			stat rtoms 400`},
		{name: "6298 3 nor is what its ACK selectively acknowledges beside it", opts: "mss 1000 sackok", text: `
			send 1+1000 x4
			+11ms
			> P. 3001+1000 re
			+201ms
			> P. 1+1000 re
			+10ms
			< . 1 ack 1001 sack 2001-3001
			stat rtoms 400`},
		{name: "7323 4.1 with timestamps it is", opts: "mss 1012 ts 1000", conf: ts, text: `
			send 1+1000
			+201ms
			> P. 1+1000 re
			+199ms
			< . 1 ack 1001 ts 1001/200
			send 1001+1000
			+210ms
			+20ms
			> P. 1001+1000 re`},
		{name: "7323 4.1 unless the ACK also answers a later one, as if the ACK of this one was lost", opts: "mss 1012 ts 1000", conf: ts, text: `
			send 1+1000 x3
			+201ms
			> P. 1+1000 re
			+9ms
			< . 1 ack 1001 ts 1001/200
			> P. 1001+1000 re x2
			stat rtoms 201
			+230ms
			> P. 1001+1000 re
			+10ms
			< . 1 ack 3001 ts 1001/210
			stat rtoms 402`},
		{name: "6298 3 nor is what its ACK selectively acknowledges, without a time-out", opts: "mss 1000 sackok", text: `
			send 1+1000 x6
			+5ms
			< . 1 ack 1 sack 1001-4001
			> P. 1+1000 re
			stat rtoms 200
			+150ms
			< . 1 ack 4001 sack 5001-6001
			> P. 4001+1000 re
			stat rtoms 200`},
		{name: "6298 3 nor is one sent before a time-out that is selectively acknowledged after it", opts: "mss 1000 sackok", text: `
			send 1+1000 x3
			+11ms
			> P. 2001+1000 re
			+200ms
			> P. 1+1000 re
			+10ms
			< . 1 ack 1 sack 1001-2001
			stat timeouts 1
			stat rtoms 400`}, // doubled, since the time-out was needless
		{name: "SHLD-11 R2 ends the connection with a RST", opts: "mss 1000", conf: func(c *Config) { c.DataTimeout = time.Second }, text: `
			send 1+1000
			+201ms
			> P. 1+1000 re
			+401ms
			> P. 1+1000 re
			+398ms
			> R. 1001
			state CLOSED
			err timed out
			released 1`},
		{name: "9293 3.9.1.8 user timeout", opts: "mss 1000", conf: func(c *Config) { c.UserTimeout = 300 * time.Millisecond }, text: `
			send 1+1000
			+201ms
			> P. 1+1000 re
			+99ms
			> R. 1001
			err timed out`},
		{name: "9293 3.9.1.8 user timeout counts from the last progress", opts: "mss 1000", conf: func(c *Config) { c.UserTimeout = 300 * time.Millisecond }, text: `
			send 1+1000 x2
			+190ms
			< . 1 ack 1001
			+190ms
			< . 1 ack 2001
			+10s
			state ESTABLISHED`},
		{name: "5681 3.2 three duplicate ACKs", opts: "mss 1000", text: `
			send 1+1000 x5
			< . 1 ack 1
			< . 1 ack 1
			< . 1 ack 1
			> P. 1+1000 re
			stat fast 1
			< . 1 ack 5001
			released 1 2 3 4 5
			deadline none`},
		{name: "6582 3.2 nor are those for what was sent again after a time-out", opts: "mss 1000", conf: reno, text: `
			send 1+1000 x10
			+201ms
			> P. 1+1000 re
			< . 1 ack 1001
			> P. 1001+1000 re x2
			< . 1 ack 2001
			> P. 3001+1000 re x2
			< . 1 ack 3001
			> P. 5001+1000 re x2
			< . 1 ack 10001
			send 10001+1000 x4
			< . 1 ack 10001
			< . 1 ack 10001
			< . 1 ack 10001
			stat recoveries 0
			< . 1 ack 11001
			< . 1 ack 11001
			< . 1 ack 11001
			< . 1 ack 11001
			> P. 11001+1000 re
			stat recoveries 1`},
		{name: "5681 2 an ACK that moves the window is no duplicate", opts: "mss 1000 win 5000", text: `
			send 1+1000 x4
			< . 1 ack 1 win 5001
			< . 1 ack 1 win 5002
			< . 1 ack 1 win 5003
			< . 1 ack 1 win 5004
			stat fast 0`},
		{name: "5681 2 nor is one with text", opts: "mss 1000", text: `
			send 1+1000 x4
			< P. 1+10 ack 1
			> . 4001 ack 11
			< P. 11+10 ack 1
			> . 4001 ack 21
			< P. 21+10 ack 1
			> . 4001 ack 31
			stat fast 0`},
		{name: "3042 limited transmit without SACK", opts: "mss 1000", text: `
			cwnd 10000
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			< . 1 ack 1
			> P. 10001+1000 new
			< . 1 ack 1
			> P. 11001+1000 new
			< . 1 ack 1
			> P. 1+1000 re`},
		{name: "6582 3.2 a partial ACK sends the next hole", opts: "mss 1000", text: `
			send 1+1000 x5
			< . 1 ack 1
			< . 1 ack 1
			< . 1 ack 1
			> P. 1+1000 re
			< . 1 ack 2001
			> P. 2001+1000 re
			< . 1 ack 5001
			stat recoveries 1`},
		{name: "6675 5 three segments SACKed", opts: sack, text: `
			send 1+1000 x4
			< . 1 ack 1 sack 1001-4001
			> P. 1+1000 re
			stat recoveries 1
			< . 1 ack 4001
			released 1 2 3 4`},
		{name: "6675 5 only what is missing is sent again", opts: sack + " rtt 100ms", text: `
			send 1+1000 x6
			+100ms
			< . 1 ack 1 sack 3001-6001 1001-2001
			> P. 1+1000 re
			> P. 2001+1000 re
			+100ms
			< . 1 ack 2001 sack 3001-6001
			< . 1 ack 6001
			stat retransmits 2`},
		{name: "8985 6.2 fewer than three SACKed: the reordering window first", opts: sack + " rtt 100ms", text: `
			send 1+1000 x2
			+100ms
			< . 1 ack 1 sack 1001-2001
			+24ms
			+2ms
			> P. 1+1000 re
			< . 1 ack 2001`},
		{name: "8985 6.2 reordering within the window costs nothing", opts: sack + " rtt 100ms", text: `
			send 1+1000 x2
			+100ms
			< . 1 ack 1 sack 1001-2001
			+24ms
			< . 1 ack 2001
			+10s
			stat retransmits 0`},
		{name: "8985 6.2 a lost retransmission is found", opts: sack + " rtt 100ms", text: `
			send 1+1000 x6
			+100ms
			< . 1 ack 1 sack 2001-5001
			> P. 1+1000 re x2
			+100ms
			< . 1 ack 1 sack 1001-5001
			> P. 1+1000 re
			> P. 5001+1000 re
			< . 1 ack 6001
			stat timeouts 0`},
		{name: "8985 7.2 7.3 the tail loss probe comes before the RTO", opts: sack + " rtt 100ms", text: `
			send 1+1000 x3
			+199ms
			+1ms
			> P. 2001+1000 re
			stat tlp 1
			+100ms
			< . 1 ack 1 sack 1001-3001
			> P. 1+1000 re
			< . 1 ack 3001
			stat timeouts 0`},
		{name: "8985 7.3 the probe is new data if there is any", opts: sack + " rtt 100ms", text: `
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			+200ms
			> P. 10001+1000 new`},
		{name: "8985 7.4.2 a probe of new data tells nothing of a loss", opts: sack + " rtt 100ms", conf: reno, text: `
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			+200ms
			> P. 10001+1000 new
			+100ms
			< . 1 ack 11001
			cwnd 21000
			send 11001+1000
			+100ms
			< . 1 ack 12001
			cwnd 21000`},
		{name: "8985 7.4.2 nor one before fast recovery, which counts the loss", opts: sack + " rtt 100ms", conf: reno, text: `
			send 1+1000 x8
			+200ms
			> P. 7001+1000 re
			+100ms
			< . 1 ack 1 sack 1001-8001
			> P. 1+1000 re
			+100ms
			< . 1 ack 8001
			cwnd 4000
			send 8001+1000
			+100ms
			< . 1 ack 9001
			cwnd 4000
			stat recoveries 1`},
		{name: "8985 7.4 a probe that repaired a loss counts as one", opts: sack + " rtt 100ms", conf: reno, text: `
			send 1+1000 x8
			+100ms
			< . 1 ack 7001
			cwnd 10000
			+400ms
			> P. 7001+1000 re
			+100ms
			< . 1 ack 8001
			send 8001+1000
			+100ms
			< . 1 ack 9001
			stat tlp 1
			cwnd 2000`},
		{name: "8985 7.4.2 also if the receiver echoes the timestamp of an earlier segment", opts: tsSack + " rtt 100ms", conf: func(c *Config) { ts(c); reno(c) }, text: `
			send 1+1000 x2
			+200ms
			> P. 1001+1000 re
			+100ms
			< . 1 ack 2001 ts 1001/100
			send 2001+1000
			+100ms
			< . 1 ack 3001
			cwnd 2000`},
		{name: "8985 7.4.2 and if it sends data meanwhile", opts: sack + " rtt 100ms", conf: reno, text: `
			send 1+1000 x2
			+200ms
			> P. 1001+1000 re
			+100ms
			< . 1 ack 2001
			send 2001+1000
			< P. 1+10 ack 2001
			> . 3001 ack 11
			+100ms
			< . 11 ack 3001
			cwnd 2000`},
		{name: "8985 7.4.2 a peer without D-SACK answers a needless probe by the same ACK", opts: tsSack + " rtt 100ms", conf: func(c *Config) { ts(c); reno(c) }, text: `
			send 1+1000 x2
			+200ms
			> P. 1001+1000 re
			+1ms
			< . 1 ack 2001 ts 1001/100
			+100ms
			< . 1 ack 2001 ts 1002/300
			send 2001+1000
			+100ms
			< . 1 ack 3001
			cwnd 10000`},
		{name: "8985 7.4 a probe that was not needed", opts: sack + " rtt 100ms", text: `
			send 1+1000 x3
			+200ms
			> P. 2001+1000 re
			< . 1 ack 3001
			< . 1 ack 3001 sack 2001-3001
			stat dsackin 1
			stat recoveries 0`},
		{name: "2883 5 one D-SACK for several retransmissions takes the reduction back", opts: sack + " rtt 100ms", text: `
			send 1+1000 x5
			+101ms
			< . 1 ack 1 sack 2001-5001
			> P. 1+1000 re x2
			+10ms
			< . 1 ack 5001
			< . 1 ack 5001 sack 1-2001
			stat dsackin 1
			stat undos 1`},
		{name: "2883 5 a D-SACK for one retransmission does not count for more after the MSS has shrunk", opts: sack + " rtt 100ms", text: `
			send 1+1000 x5
			+101ms
			< . 1 ack 1 sack 2001-5001
			> P. 1+1000 re x2
			mtu 552
			+10ms
			< . 1 ack 5001
			< . 1 ack 5001 sack 1001-2001
			stat dsackin 1
			stat undos 0
			< . 1 ack 5001 sack 1-1001
			stat undos 1`},
		{name: "2018 8 reneging: the time-out forgets what was SACKed", opts: sack + " rtt 100ms", text: `
			send 1+1000 x3
			+100ms
			< . 1 ack 1 sack 1001-2001
			< . 1 ack 1001
			+299ms
			+1ms
			> P. 1001+1000 re
			< . 1 ack 2001
			> P. 2001+1000 re
			< . 1 ack 3001
			released 1 2 3`},
		{name: "2018 8 SACK of what is not outstanding is ignored", opts: sack, text: `
			send 1+1000
			< . 1 ack 1 sack 5001-9001
			< . 1 ack 1 sack 600-500
			< . 1 ack 1 sack 501-501
			< . 1 ack 1001`},
		{name: "2018 4 a block that covers half of a segment", opts: sack, text: `
			send 1+1000 x2
			< . 1 ack 1 sack 1501-2001
			+201ms
			> P. 1001+1000 re
			< . 1 ack 2001
			released 1 2`},
		{name: "9293 3.10.7.4 an ACK in the midst of a record releases nothing", opts: "mss 1000", text: `
			send 1+1000
			< . 1 ack 501
			released none
			+201ms
			> P. 1+1000 re off 0
			< . 1 ack 1001
			released 1`},
		{name: "5682 3.1 a true time-out is not", opts: sack + " rtt 100ms", conf: reno, text: `
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			+200ms
			> P. 10001+1000 new
			+300ms
			> P. 1+1000 re
			+100ms
			< . 1 ack 1001
			> P. 11001+1000 new
			+100ms
			< . 1 ack 1001 sack 11001-12001
			> P. 1001+1000 re x2
			stat spurious 0`},
		{name: "5682 3.1 a spurious time-out is taken back", opts: sack + " rtt 100ms", conf: reno, text: `
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			+200ms
			> P. 10001+1000 new
			+300ms
			> P. 1+1000 re
			stat timeouts 1
			cwnd 1000
			< . 1 ack 1001
			> P. 11001+1000 new
			stat spurious 0
			< . 1 ack 2001
			stat spurious 1
			cwnd 10000
			< . 1 ack 12001
			stat retransmits 1`},
		{name: "3522 3.2 a timestamp shows that the time-out was spurious", opts: tsSack + " rtt 100ms", conf: ts, text: `
			send 1+1000 x3
			+200ms
			> P. 2001+1000 re
			+300ms
			> P. 1+1000 re
			stat timeouts 1
			+1ms
			< . 1 ack 1001 ts 1001/100
			stat spurious 1
			cwnd 10000
			< . 1 ack 3001 ts 1001/100
			deadline none`},
		{name: "5682 4 a spurious time-out in a recovery takes back no more than itself", opts: tsSack + " rtt 100ms", conf: ts, text: `
			send 1+1000 x10
			+100ms
			< . 1 ack 1 sack 2001-10001
			stat recoveries 1
			> P. 1+1000 re x2
			+500ms
			> P. 1+1000 re
			stat timeouts 1
			+1ms
			< . 1 ack 1001 sack 2001-10001 ts 1001/200
			stat spurious 1
			cwnd 7000`},
		{name: "5682 4 nor does one that follows a true one", opts: tsSack + " rtt 100ms", conf: ts, text: `
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			+200ms
			> P. 10001+1000 new
			+300ms
			> P. 1+1000 re
			+100ms
			< . 1 ack 1001
			> P. 11001+1000 new
			+600ms
			> P. 1001+1000 re
			stat timeouts 2
			+1ms
			< . 1 ack 2001 ts 1001/100
			stat spurious 1
			cwnd 2000`},
		{name: "5681 3.1 what arrived before a time-out does not open the window after it", opts: "mss 1000 sackok", text: `
			send 1+1000 x8
			< . 1 ack 1 sack 1001-8001
			> P. 1+1000 re
			+201ms
			> P. 1+1000 re
			cwnd 1000
			< . 1 ack 8001
			cwnd 2000`},
		{name: "5681 3.1 nor does it without SACK", opts: "mss 1000", conf: reno, text: `
			send 1+1000 x8
			+201ms
			> P. 1+1000 re
			cwnd 1000
			< . 1 ack 8001
			cwnd 2000`},
		{name: "5682 2.1 without SACK the ACK of a retransmission is no sign of a spurious time-out", opts: "mss 1000 rtt 100ms", conf: reno, text: `
			send 1+1000 x2
			+100ms
			< . 1 ack 1
			+200ms
			> P. 1+1000 re
			+100ms
			< . 1 ack 2001
			stat spurious 0
			cwnd 2000`},
		{name: "3522 3.2 the echo of a retransmission from before a recovery takes nothing back", opts: tsSack + " rtt 50ms", conf: ts, text: `
			push 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000
			> P. 1+1000 x10
			+50ms
			< . 1 ack 1 sack 1001-4001 ts 1001/50
			> P. 1+1000 re # and lost again
			+1ms
			< . 1 ack 1 sack 1001-7001
			> P. 10001+1000 new # lost
			> P. 11001+1000 x2
			+1ms
			< . 1 ack 1 sack 1001-10001
			> P. 13001+1000
			> P. 14001+1000 new # lost
			> P. 15001+1000
			+49ms
			< . 1 ack 1 sack 11001-13001 1001-10001
			> P. 1+1000 re
			> P. 10001+1000 re
			> P. 16001+1000 new # lost
			> P. 17001+1000
			+1ms
			< . 1 ack 1 sack 11001-14001 1001-10001
			> P. 18001+1000
			+1ms
			< . 1 ack 1 sack 15001-16001 11001-14001 1001-10001
			> P. 14001+1000 re
			+48ms
			< . 1 ack 10001 sack 15001-16001 11001-14001 ts 1002/151
			stat recoveries 1
			< . 1 ack 14001 sack 15001-16001
			< . 1 ack 14001 sack 17001-19001 15001-16001
			> P. 16001+1000 re
			stat recoveries 2
			+2ms
			< . 1 ack 16001 sack 17001-19001 ts 1002/153
			stat undos 0
			+48ms
			< . 1 ack 19001 ts 1002/201
			deadline none
			stat undos 0`},
		{name: "2883 5 D-SACK of every retransmission takes a recovery back", opts: sack, text: `
			send 1+1000 x4
			< . 1 ack 1 sack 1001-4001
			> P. 1+1000 re
			< . 1 ack 4001
			< . 1 ack 4001 sack 1-1001
			stat undos 1
			cwnd 10000`},
		{name: "5681 3.1 a time-out brings the window to one segment", opts: "mss 1000", text: `
			send 1+1000 x3
			+201ms
			> P. 1+1000 re
			cwnd 1000`},
		{name: "5681 4.1 an idle connection restarts from the initial window", opts: "mss 1000", conf: reno, text: `
			send 1+1000 x10
			< . 1 ack 10001
			cwnd 20000
			+1s
			send 10001+10
			cwnd 10000`},
		{name: "9438 5.8 a window that is not used does not grow", opts: "mss 1000", text: `
			send 1+1000
			< . 1 ack 1001
			send 1001+1000
			< . 1 ack 2001
			cwnd 10000`},
		{name: "9293 3.10.7.4 sequence numbers wrap under loss", opts: "mss 1000 sackok iss 0xfffff800", text: `
			send 1+1000 x5
			< . 1 ack 1001 sack 2001-5001
			> P. 1001+1000 re
			< . 1 ack 5001
			released 1 2 3 4 5`},
		{name: "5044 A a retransmission is the same record", opts: "mss 1460", text: `
			push 100 200 300
			> P. 1+100 buf 1
			> P. 101+200 buf 2
			> P. 301+300 buf 3
			+201ms
			> P. 1+100 re buf 1
			> P. 101+200 re buf 2
			> P. 301+300 re buf 3
			< . 1 ack 601
			released 1 2 3`},
		{name: "3168 6.1.2 an ECN echo lowers the window, once", opts: "mss 1000", conf: func(c *Config) { withECN(c); reno(c) }, text: `
			push 1000 1000 1000 1000
			> P. 1+1000 ect x4
			< E. 1 ack 1001
			stat ecn 1
			< E. 1 ack 2001
			< E. 1 ack 3001
			< E. 1 ack 4001
			stat ecn 1
			push 1000
			> CP. 4001+1000 ect
			< E. 1 ack 5001
			stat ecn 2
			push 1000
			> CP. 5001+1000 ect
			< . 1 ack 6001
			push 1000
			> P. 6001+1000 ect`},
		{name: "3168 6.1.2 nor does it after a loss in the same window", opts: "mss 1000 sackok", conf: func(c *Config) { withECN(c); reno(c) }, text: `
			push 1000 1000 1000 1000 1000
			> P. 1+1000 ect x5
			< E. 1 ack 1 sack 1001-4001
			> P. 1+1000 re noect
			stat recoveries 1
			< E. 1 ack 5001
			stat ecn 0
			push 1000
			> CP. 5001+1000 ect
			< . 1 ack 6001
			stat ecn 0`},
		{name: "6582 3.2 after a spurious time-out duplicate ACKs are for a loss", opts: "mss 1000 rtt 100ms", conf: reno, text: `
			send 1+1000 x8
			push 1000 1000 1000 1000
			> P. 8001+1000 x2
			+401ms
			> P. 1+1000 re
			< . 1 ack 1001
			> P. 10001+1000 new x2
			< . 1 ack 2001
			stat spurious 1
			< . 1 ack 2001
			< . 1 ack 2001
			< . 1 ack 2001
			> P. 2001+1000 re
			stat recoveries 1`},
		{name: "3168 6.1.2 a late D-SACK for an earlier loss does not take it back", opts: "mss 1000 sackok", conf: func(c *Config) { withECN(c); reno(c) }, text: `
			push 1000 1000 1000 1000 1000
			> P. 1+1000 ect x5
			< . 1 ack 1 sack 1001-4001
			> P. 1+1000 re noect
			< . 1 ack 5001
			cwnd 3500
			push 1000
			> CP. 5001+1000 ect
			< E. 1 ack 6001
			stat ecn 1
			< . 1 ack 6001 sack 1-1001
			stat dsackin 1
			stat undos 0
			cwnd 2000`},
		{name: "3168 6.1.5 retransmissions and ACKs are not ECN-capable", opts: "mss 1000", conf: withECN, text: `
			push 1000
			> P. 1+1000 ect
			+201ms
			> P. 1+1000 re noect
			< P. 1+10 ack 1001
			> . 1001 ack 11 noect`},
		{name: "3168 6.1.3 a mark is echoed until CWR", opts: "mss 1000", conf: withECN, text: `
			< P. 1+10 ack 1 ce
			> E. 1 ack 11
			< P. 11+10 ack 1 ect
			> E. 1 ack 21
			< CP. 21+10 ack 1 ect
			> . 1 ack 31`},
		{name: "8257 3.2 DCTCP echoes the change of marks", opts: "mss 1000", conf: func(c *Config) { c.CongestionControl = DCTCP }, text: `
			< P. 1+10 ack 1 ect
			> . 1 ack 11
			< P. 11+10 ack 1 ce
			> E. 1 ack 21
			< P. 21+10 ack 1 ect
			> . 1 ack 31`},
		{name: "8257 3.2 what has waited for an ACK has one without the new mark", opts: "mss 1000", conf: func(c *Config) { c.CongestionControl = DCTCP }, text: `
			quick
			< P. 1+1000 ack 1 ect
			< P. 1001+1000 ack 1 ce
			> . 1 ack 1001
			> E. 1 ack 2001`},
	})
}
