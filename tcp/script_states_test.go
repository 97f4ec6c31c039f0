package tcp

import (
	"fmt"
	"strings"
	"testing"
)

// syncState is a synchronized state: how a script reaches it, and the next sequence numbers of both sides in it.
type syncState struct {
	name     string
	prelude  string
	snd, rcv int
	reads    bool // data from the peer is still accepted
	eof      bool // the peer's FIN has arrived
}

var syncStates = []syncState{
	{"ESTABLISHED", "", 1, 1, true, false},
	{"FIN-WAIT-1", "close\n> F. 1 ack 1", 2, 1, true, false},
	{"FIN-WAIT-2", "close\n> F. 1 ack 1\n< . 1 ack 2", 2, 1, true, false},
	{"CLOSE-WAIT", "< F. 1 ack 1\n> . 1 ack 2", 1, 2, false, true},
	{"CLOSING", "close\n> F. 1 ack 1\n< F. 1 ack 1\n> . 2 ack 2", 2, 2, false, true},
	{"LAST-ACK", "< F. 1 ack 1\n> . 1 ack 2\nclose\n> F. 1 ack 2", 2, 2, false, true},
	{"TIME-WAIT", "close\n> F. 1 ack 1\n< . 1 ack 2\n< F. 1 ack 2\n> . 2 ack 2", 2, 2, false, true},
}

// una is the acknowledgement number that does not change the state.
func (s *syncState) una() int {
	switch s.name {
	case "FIN-WAIT-1", "CLOSING", "LAST-ACK":
		return 1
	}
	return s.snd
}

// TestScriptStates sends the same segments to a connection in each state.
func TestScriptStates(t *testing.T) {
	var all []script
	for _, st := range syncStates {
		s, r := st.snd, st.rcv
		add := func(name, format string, args ...any) {
			all = append(all, script{name: name + ", " + st.name, text: st.prelude + "\nstate " + st.name + "\n" + fmt.Sprintf(format, args...)})
		}
		challenge := fmt.Sprintf("> . %d ack %d\nstate %s", s, r, st.name)
		stay := "state " + st.name

		resetErr := "reset by peer"
		switch st.name {
		case "CLOSING", "LAST-ACK", "TIME-WAIT":
			resetErr = "none"
		}
		add("5961 3.2 RST at the exact number", "< R %d\nstate CLOSED\nerr %s\ndeadline none", r, resetErr)
		add("SHLD-2 RST with data", "< R %d+100\nstate CLOSED\nerr %s\ndeadline none", r, resetErr)
		add("5961 3.2 RST in the window", "< R %d\n%s\nstat challenge 1", r+100, challenge)
		add("5961 3.2 RST outside of the window", "< R %d\n< R %d\n%s\nstat challenge 0", r-1, r+70000, stay)
		add("5961 4.2 SYN in the window", "< S. %d ack %d\n%s\nstat challenge 1", r+10, st.una(), challenge)
		add("5961 4.2 SYN at the exact number", "< S. %d ack %d\n%s", r, st.una(), challenge)
		if st.name != "TIME-WAIT" {
			add("5961 4.2 SYN outside of the window", "< S %d\n%s", r-1000, challenge)
		}
		add("5961 5.2 ACK of what was not sent", "< . %d ack %d\n%s\nstat challenge 1", r, s+1, challenge)
		add("5961 5.2 ACK of long ago", "< . %d ack %d\n%s\nstat challenge 1", r, -70000, challenge)
		add("9293 3.10.7.4 no ACK bit", "< P %d+10\nin drop\n%s", r, stay)
		add("9293 3.10.7.4 an old ACK does nothing", "< . %d ack 0\n%s", r, stay)
		if st.reads {
			add("9293 3.10.7.4 text in order", "< P. %d+100 ack %d\nin deliver %d+100\n> . %d ack %d\n%s", r, st.una(), r, s, r+100, stay)
			add("9293 3.10.7.4 text out of order is held", "< P. %d+100 ack %d\nin hold %d+100\n> . %d ack %d\n%s", r+50, st.una(), r+50, s, r, stay)
			add("9293 3.10.7.4 text without the ACK of anything new, urgent", "< PU. %d+100 ack %d\nin deliver %d+100\n> . %d ack %d", r, st.una(), r, s, r+100)
			add("9293 3.10.7.4 text that is old in part", "< P. %d+100 ack %d\nin deliver %d+100\n> . %d ack %d\n< P. %d+150 ack %d\nin deliver %d+50\n> . %d ack %d",
				r, st.una(), r, s, r+100, r, st.una(), r+100, s, r+150)
			add("9293 3.4 text beyond the window", "< P. %d+100 ack %d\nin drop\n%s", r+65535, st.una(), challenge)
			add("9293 3.4 text that is beyond the window in part", "< P. %d+200 ack %d\nin hold %d+100\n> . %d ack %d", r+65435, st.una(), r+65435, s, r)
		} else {
			add("9293 3.10.7.4 text after FIN is ignored", "< P. %d+100 ack %d\nin drop", r, st.una())
			all[len(all)-1].text += map[bool]string{true: "", false: "\n> . " + fmt.Sprint(s) + " ack " + fmt.Sprint(r)}[st.name == "TIME-WAIT"] + "\n" + stay
			add("9293 3.10.7.4 the FIN again", "< F. 1 ack %d\n%s", st.una(), challenge)
		}
		add("9293 3.10.7.4 text received before is acknowledged", "< P. %d+100 ack %d\nin drop\n%s", r-100, st.una(), challenge)
		switch st.name {
		case "CLOSING", "LAST-ACK", "TIME-WAIT":
			add("9293 3.10.5 ABORT", "abort\nstate CLOSED\nerr aborted")
		default:
			add("9293 3.10.5 ABORT", "abort\n> R. %d ack %d\nstate CLOSED\nerr aborted\nevent %s", s, r, map[bool]string{true: "peer-closed", false: "closed"}[st.eof])
		}
		if !strings.Contains("ESTABLISHED CLOSE-WAIT", st.name) {
			add("9293 3.10.4 CLOSE again", "close\n%s", stay)
			add("9293 3.10.2 SEND after CLOSE", "push 100\n%s\nreleased 1\nroom 0", stay)
		}
		add("5961 7 challenge ACKs are limited", "%s%s\n+1s%s\n< R %d\n> . %d ack %d",
			strings.Repeat(fmt.Sprintf("< R %d\n> . %d ack %d\n", r+100, s, r), challengeLimit), fmt.Sprintf("< R %d\n< R %d", r+100, r+100),
			map[bool]string{true: "\n> F. 1 re\n> F. 1 re", false: ""}[s == 2 && st.una() == 1], r+100, s, r)
	}
	runScripts(t, all)
}

func TestScriptClose(t *testing.T) {
	runScripts(t, []script{
		{name: "9293 3.6 figure 12 normal close", text: `
			close
			> F. 1 ack 1
			state FIN-WAIT-1
			< . 1 ack 2
			state FIN-WAIT-2
			< F. 1 ack 2
			> . 2 ack 2
			state TIME-WAIT
			event peer-closed
			+9999ms
			state TIME-WAIT
			+1ms
			state CLOSED
			err none
			event closed
			deadline none`},
		{name: "9293 3.6 figure 12 the other side", text: `
			< F. 1 ack 1
			> . 1 ack 2
			state CLOSE-WAIT
			event peer-closed
			close
			> F. 1 ack 2
			state LAST-ACK
			< . 2 ack 2
			state CLOSED
			err none
			event closed
			deadline none`},
		{name: "9293 3.6 figure 13 simultaneous close", text: `
			close
			> F. 1 ack 1
			< F. 1 ack 1
			> . 2 ack 2
			state CLOSING
			< . 2 ack 2
			state TIME-WAIT`},
		{name: "9293 3.10.7.4 FIN and ACK of ours together", text: `
			close
			> F. 1 ack 1
			< F. 1 ack 2
			> . 2 ack 2
			state TIME-WAIT`},
		{name: "9293 3.6 half close, the peer still sends", text: `
			close
			> F. 1 ack 1
			< . 1 ack 2
			< P. 1+100 ack 2
			in deliver 1+100
			> . 2 ack 101
			< FP. 101+50 ack 2
			in deliver 101+50
			> . 2 ack 152
			state TIME-WAIT`},
		{name: "9293 3.6 half close, we still send", text: `
			< F. 1 ack 1
			> . 1 ack 2
			push 100
			> P. 1+100 ack 2
			close
			> F. 101 ack 2
			< . 2 ack 101
			state LAST-ACK
			released 1
			< . 2 ack 102
			state CLOSED`},
		{name: "9293 3.10.4 the FIN waits for what is queued", opts: "mss 1460 win 100", text: `
			push 100 100
			> P. 1+100
			close
			state FIN-WAIT-1
			< . 1 ack 101 win 200
			> P. 101+100
			> F. 201
			< . 1 ack 202
			state FIN-WAIT-2`},
		{name: "9293 3.8.6 a FIN may lie on the edge of the window", opts: "mss 1460 win 100", text: `
			send 1+100
			close
			> F. 101`},
		{name: "9293 3.8.1 the FIN is sent again", text: `
			close
			> F. 1
			+201ms
			> F. 1 re
			+401ms
			> F. 1 re
			< . 1 ack 2
			state FIN-WAIT-2
			+10s`},
		{name: "9293 3.10.7.4 FIN out of order", text: `
			< F. 101 ack 1
			> . 1 ack 1
			state ESTABLISHED
			< P. 1+100 ack 1
			in deliver 1+100
			> . 1 ack 102
			state CLOSE-WAIT`},
		{name: "9293 3.10.7.4 FIN with text out of order", text: `
			< FP. 101+100 ack 1
			in hold 101+100
			> . 1 ack 1
			< P. 1+100 ack 1
			in deliver 1+100
			held 101+100
			> . 1 ack 202
			state CLOSE-WAIT`},
		{name: "9293 3.10.7.4 FIN in order after another one out of order", text: `
			< F. 101 ack 1
			> . 1 ack 1
			< F. 1 ack 1
			> . 1 ack 2
			state CLOSE-WAIT`},
		{name: "9293 3.10.7.4 FIN behind the window is cut off", conf: func(c *Config) { c.RcvWindow = 1000 }, text: `
			< FP. 1+1200 ack 1
			in deliver 1+1000
			> . 1 ack 1001
			state ESTABLISHED`},
		{name: "9293 3.4 a FIN fits on a full window", conf: func(c *Config) { c.RcvWindow = 1000 }, text: `
			backlog 1000
			< P. 1+1000 ack 1
			> . 1 ack 1001 win 0
			< F. 1001 ack 1
			> . 1 ack 1002
			state CLOSE-WAIT`},
		{name: "MUST-13 TIME-WAIT, the FIN again starts 2MSL anew", text: `
			close
			> F. 1
			< F. 1 ack 2
			> . 2 ack 2
			+9s
			< F. 1 ack 2
			> . 2 ack 2
			+9s
			state TIME-WAIT
			+1s
			state CLOSED`},
		{name: "MAY-2 TIME-WAIT, a later SYN reopens", text: `
			close
			> F. 1
			< F. 1 ack 2
			> . 2 ack 2
			< S 5000
			in reopen
			state CLOSED
			err none`},
		{name: "MAY-2 TIME-WAIT, an earlier SYN does not", text: `
			close
			> F. 1
			< F. 1 ack 2
			> . 2 ack 2
			< S -5000
			> . 2 ack 2
			state TIME-WAIT`},
		{name: "6191 2 TIME-WAIT, a later timestamp reopens", opts: "mss 1460 ts 1000", conf: fullOptions, text: `
			close
			> F. 1
			< F. 1 ack 2
			> . 2 ack 2
			< S -5000 ts 1001
			in reopen`},
		{name: "6191 2 TIME-WAIT, an earlier timestamp does not", opts: "mss 1460 ts 1000", conf: fullOptions, text: `
			close
			> F. 1
			< F. 1 ack 2
			> . 2 ack 2
			< S 5000 ts 999
			> . 2 ack 2
			state TIME-WAIT`},
		{name: "6191 2 TIME-WAIT, the same timestamp and a later number", opts: "mss 1460 ts 1000", conf: fullOptions, text: `
			close
			> F. 1
			< F. 1 ack 2
			> . 2 ack 2
			< S 5000 ts 1000
			in reopen`},
		{name: "9293 3.6 FIN-WAIT-2 does not last for ever", text: `
			close
			> F. 1
			< . 1 ack 2
			+59s
			state FIN-WAIT-2
			+1s
			> R. 2 ack 1
			state CLOSED
			err timed out`},
		{name: "9293 3.6 FIN-WAIT-2 lasts while text comes", text: `
			close
			> F. 1
			< . 1 ack 2
			+59s
			< P. 1+10 ack 2
			> . 2 ack 11
			+59s
			state FIN-WAIT-2
			< F. 11 ack 2
			> . 2 ack 12
			state TIME-WAIT`},
		{name: "9293 3.10.5 ABORT gives everything back", opts: "mss 1460 win 100", text: `
			push 100 100
			> P. 1+100
			< P. 101+100 ack 1 win 100
			in hold
			> . 101 ack 1
			abort
			> R. 101 ack 1
			released 1 2
			held drop
			held none`},
		{name: "5961 3.2 RST gives everything back", text: `
			send 1+100
			< P. 101+100 ack 1
			in hold
			> . 101 ack 1
			< R 1
			released 1
			held drop
			state CLOSED`},
		{name: "9293 3.10.7.4 CLOSING, our FIN is sent again", text: `
			close
			> F. 1
			< F. 1 ack 1
			> . 2 ack 2
			+201ms
			> F. 1 ack 2 re
			< . 2 ack 2
			state TIME-WAIT`},
		{name: "9293 3.10.7.4 FIN takes a number at the wrap", opts: "mss 1460 iss 0xfffffffe peer 0xfffffffe", text: `
			send 1+1
			close
			> F. 2
			< F. 1 ack 3
			> . 3 ack 2
			state TIME-WAIT`},
	})
}
