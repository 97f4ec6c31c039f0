package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

func (c *command) top() *cobra.Command {
	var interval time.Duration
	var count int
	var by string
	cmd := &cobra.Command{
		Use: "top", Short: "Show the activity of the daemon and its connections live",
		Long: "Show the busiest queue pairs, and the rates of the daemon, until q is typed.\n\n" +
			"Keys: q quit, s sort by the next column, p pause, up and down (or k and j)\n" +
			"scroll. Without a terminal it prints one screen per interval, and with --json\n" +
			"one object.",
		Example: "  iwarpctl top\n  iwarpctl top --interval 5s --sort retransmissions\n  iwarpctl top --json --count 1",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkLooks(interval, count); err != nil {
				return err
			}
			at := slices.IndexFunc(topSorts, func(s topSort) bool { return s.name == by })
			if at < 0 {
				return usageError{fmt.Errorf("--sort %q: must be one of %s", by, strings.Join(sortNames(), ", "))}
			}
			return c.runTop(cmd.Context(), interval, count, at)
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "interval between samples")
	cmd.Flags().IntVarP(&count, "count", "n", 0, "number of samples; 0: until stopped")
	cmd.Flags().StringVar(&by, "sort", "rate", "column to sort by: rate, retransmissions, rtt or qp")
	completes(cmd, "sort", sortNames()...)
	return cmd
}

// topSample holds the answers of the daemon at one time.
type topSample struct {
	at       time.Time
	status   *ctrlpb.StatusReply
	counters map[string]uint64
	qps      []*ctrlpb.QPInfo
}

// topQP is a queue pair with its rates since the previous sample.
type topQP struct {
	QP          uint32  `json:"qp"`
	State       string  `json:"state"`
	Local       string  `json:"local"`
	Remote      string  `json:"remote"`
	Client      uint32  `json:"client"`
	RxBytes     float64 `json:"rx_bytes_per_s"`
	TxBytes     float64 `json:"tx_bytes_per_s"`
	Messages    float64 `json:"messages_per_s"`
	Retransmits float64 `json:"retransmits_per_s"`
	RTT         uint64  `json:"srtt_ns"`
	Cwnd        uint64  `json:"cwnd"`
}

// topView is the content of the screen.
type topView struct {
	Time        time.Time `json:"time"`
	Interface   string    `json:"interface"`
	Clients     uint32    `json:"clients"`
	Conns       uint32    `json:"connections"`
	QPCount     uint32    `json:"queue_pairs"`
	Registered  uint64    `json:"registered"`
	RxBytes     float64   `json:"rx_bytes_per_s"`
	TxBytes     float64   `json:"tx_bytes_per_s"`
	RxFrames    float64   `json:"rx_frames_per_s"`
	TxFrames    float64   `json:"tx_frames_per_s"`
	RxFPDUs     float64   `json:"rx_fpdus_per_s"`
	TxFPDUs     float64   `json:"tx_fpdus_per_s"`
	Retransmits float64   `json:"retransmits_per_s"`
	QPs         []topQP   `json:"qps"`
}

type topSort struct {
	name string
	less func(a, b *topQP) int
}

var topSorts = []topSort{
	{"rate", func(a, b *topQP) int { return cmp.Compare(b.RxBytes+b.TxBytes, a.RxBytes+a.TxBytes) }},
	{"retransmissions", func(a, b *topQP) int { return cmp.Compare(b.Retransmits, a.Retransmits) }},
	{"rtt", func(a, b *topQP) int { return cmp.Compare(b.RTT, a.RTT) }},
	{"qp", func(*topQP, *topQP) int { return 0 }},
}

func sortNames() []string {
	var names []string
	for _, s := range topSorts {
		names = append(names, s.name)
	}
	return names
}

// look queries everything that top shows.
func look(ctx context.Context, a *iwarp.Admin) (s *topSample, err error) {
	s = &topSample{counters: make(map[string]uint64)}
	if s.status, err = status(a, ctx); err != nil {
		return nil, err
	}
	cs, err := a.Stats(ctx)
	if err != nil {
		return nil, err
	}
	for _, k := range cs {
		s.counters[k.Name] = k.Value
	}
	s.at = time.Now()
	s.qps, err = a.QPs(ctx)
	return s, err
}

// view computes the rates between two samples; last may be nil.
func view(last, now *topSample, sortBy int) *topView {
	took := 0.0
	if last != nil {
		took = now.at.Sub(last.at).Seconds()
	}
	rate := func(was, is uint64) float64 {
		if took <= 0 || is < was {
			return 0
		}
		return float64(is-was) / took
	}
	total := func(name string) float64 {
		if last == nil {
			return 0
		}
		return rate(last.counters[name], now.counters[name])
	}
	var names []string
	for _, d := range now.status.GetDevices() {
		names = append(names, d.GetInterface())
	}
	v := &topView{
		Time: now.at, Interface: strings.Join(names, ", "), Clients: now.status.Clients, Conns: now.status.Conns, QPCount: now.status.Qps,
		Registered: now.status.Registered, RxBytes: total("engine.rx_bytes"), TxBytes: total("engine.tx_bytes"),
		RxFrames: total("engine.rx_frames"), TxFrames: total("engine.tx_frames"), RxFPDUs: total("engine.rx_fpdus"), TxFPDUs: total("engine.tx_fpdus"),
		Retransmits: total("engine.tx_retransmits"), QPs: []topQP{},
	}
	before := make(map[uint32]*ctrlpb.QPInfo)
	if last != nil {
		for _, q := range last.qps {
			before[q.Qp] = q
		}
	}
	for _, q := range now.qps {
		t := topQP{QP: q.Qp, State: q.State, Local: q.Local, Remote: q.Remote, Client: q.Client,
			RTT: llp(q, "srtt_ns", "path_srtt_ns"), Cwnd: llp(q, "cwnd", "path_cwnd")}
		if b := before[q.Qp]; b != nil {
			t.RxBytes = rate(llp(b, "bytes_in", "rx_bytes"), llp(q, "bytes_in", "rx_bytes"))
			t.TxBytes = rate(llp(b, "bytes_out", "tx_bytes"), llp(q, "bytes_out", "tx_bytes"))
			t.Retransmits = rate(llp(b, "retransmits", "retransmits"), llp(q, "retransmits", "retransmits"))
			t.Messages = rate(messages(b.Rdmap), messages(q.Rdmap))
		}
		v.QPs = append(v.QPs, t)
	}
	slices.SortStableFunc(v.QPs, func(a, b topQP) int {
		return cmp.Or(topSorts[sortBy].less(&a, &b), cmp.Compare(a.QP, b.QP))
	})
	return v
}

// llp returns a counter of the transport of q, by its name for TCP or SCTP.
func llp(q *ctrlpb.QPInfo, tcp, sctp string) uint64 {
	if len(q.Sctp) > 0 {
		return counter(q.Sctp, sctp)
	}
	return counter(q.Tcp, tcp)
}

func counter(cs []*ctrlpb.Counter, name string) uint64 {
	for _, k := range cs {
		if k.Name == name {
			return k.Value
		}
	}
	return 0
}

// messages returns the number of messages of a stream, in both directions.
func messages(cs []*ctrlpb.Counter) uint64 {
	var n uint64
	for _, k := range cs {
		switch k.Name {
		case "tx_writes", "tx_read_requests", "tx_read_responses", "tx_sends", "tx_imms", "tx_atomics", "tx_atomic_responses",
			"rx_writes", "rx_read_requests", "rx_read_responses", "rx_sends", "rx_imms", "rx_atomics", "rx_atomic_responses":
			n += k.Value
		}
	}
	return n
}

// screen formats the view in lines of at most width columns. It shows rows queue pairs starting at
// offset, or all if rows is negative.
func (v *topView) screen(width, rows, offset int, note string) []string {
	lines := []string{
		fmt.Sprintf("iwarpd on %s   %s   %s", v.Interface, v.Time.Format(time.TimeOnly), note),
		fmt.Sprintf("clients %d   connections %d   queue pairs %d   registered %s", v.Clients, v.Conns, v.QPCount, bytesText(v.Registered)),
		fmt.Sprintf("in  %12s/s %9.0f frames/s %9.0f FPDUs/s", bits(v.RxBytes), v.RxFrames, v.RxFPDUs),
		fmt.Sprintf("out %12s/s %9.0f frames/s %9.0f FPDUs/s   %.0f retransmissions/s", bits(v.TxBytes), v.TxFrames, v.TxFPDUs, v.Retransmits),
		"",
		fmt.Sprintf("%4s %-5s %10s %10s %6s %6s %7s  %-21s %9s %6s", "qp", "state", "in/s", "out/s", "msgs/s", "retr/s", "rtt", "remote", "cwnd", "client"),
	}
	qps := v.QPs[min(offset, len(v.QPs)):]
	if rows >= 0 {
		qps = qps[:min(rows, len(qps))]
	}
	for _, q := range qps {
		lines = append(lines, fmt.Sprintf("%4d %-5s %10s %10s %6.0f %6.0f %7v  %-21s %9s %6d", q.QP, q.State, bits(q.RxBytes), bits(q.TxBytes),
			q.Messages, q.Retransmits, time.Duration(q.RTT).Round(time.Microsecond), q.Remote, bytesText(q.Cwnd), q.Client))
	}
	for i, l := range lines {
		lines[i] = text.Trim(l, width)
	}
	return lines
}

// bits formats a rate in bytes per second as bits per second.
func bits(perSec float64) string {
	v := perSec * 8
	for _, unit := range []string{"bit", "kbit", "Mbit"} {
		if v < 1000 {
			return fmt.Sprintf("%.1f %s", v, unit)
		}
		v /= 1000
	}
	return fmt.Sprintf("%.2f Gbit", v)
}

func (c *command) runTop(ctx context.Context, interval time.Duration, count, sortBy int) error {
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	out, isFile := c.file()
	if isFile && !c.json && term.IsTerminal(int(out.Fd())) && term.IsTerminal(int(os.Stdin.Fd())) {
		return liveTop(ctx, dev.Admin(), out, interval, count, sortBy)
	}
	if count > 0 {
		count++ // the first sample has no rates
	}
	var last *topSample
	return every(ctx, interval, count, func(time.Time) error {
		now, err := look(ctx, dev.Admin())
		if err != nil {
			return err
		}
		before := last
		if last = now; before == nil {
			return nil
		}
		v := view(before, now, sortBy)
		if c.json {
			return encoder(c.out).Encode(v)
		}
		_, err = fmt.Fprintln(c.out, strings.Join(v.screen(200, -1, 0, ""), "\n"))
		return err
	})
}

// A topUI is the state that keys change.
type topUI struct {
	sortBy, offset int
	paused         bool
}

// keys handles keyboard input.
func (u *topUI) keys(b []byte, qps int) {
	for len(b) > 0 {
		n := 1
		switch {
		case b[0] == 's':
			u.sortBy = (u.sortBy + 1) % len(topSorts)
		case b[0] == 'p':
			u.paused = !u.paused
		case b[0] == 'j':
			u.offset++
		case b[0] == 'k':
			u.offset--
		case bytes.HasPrefix(b, []byte("\x1b[B")):
			u.offset++
			n = 3
		case bytes.HasPrefix(b, []byte("\x1b[A")):
			u.offset--
			n = 3
		}
		b = b[n:]
	}
	u.offset = max(0, min(u.offset, qps-1))
}

// liveTop draws on the alternate screen of a terminal.
func liveTop(ctx context.Context, a *iwarp.Admin, out *os.File, interval time.Duration, count, sortBy int) error {
	in := int(os.Stdin.Fd())
	old, err := term.MakeRaw(in)
	if err != nil {
		return err
	}
	defer func() { _ = term.Restore(in, old) }()
	fmt.Fprint(out, "\x1b[?1049h\x1b[?25l")       // alternate screen, no cursor
	defer fmt.Fprint(out, "\x1b[?25h\x1b[?1049l") // and back
	typed := make(chan []byte, 16)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go readKeys(os.Stdin, typed, cancel) // its last read ends when the program exits

	ui := topUI{sortBy: sortBy}
	var last, now *topSample
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for n := 0; ; {
		if !ui.paused || now == nil {
			s, err := look(ctx, a)
			if err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
			last, now = now, s
			n++
		}
		for waiting := true; waiting; {
			draw(out, view(last, now, ui.sortBy), &ui)
			if n == count {
				return nil
			}
			select {
			case <-tick.C:
				waiting = false
			case b, ok := <-typed:
				if !ok {
					return errors.New("the terminal is gone")
				}
				ui.keys(b, len(now.qps))
			case <-ctx.Done():
				return nil
			}
		}
	}
}

// readKeys sends what is typed, and calls quit when that is what it asks for, also while top waits for a daemon that does
// not answer: in raw mode the terminal sends no signals.
func readKeys(r io.Reader, typed chan<- []byte, quit func()) {
	for {
		b := make([]byte, 64)
		n, err := r.Read(b)
		switch {
		case err != nil:
			close(typed)
			return
		case bytes.ContainsAny(b[:n], "q\x03"): // q, or interrupt
			quit()
			return
		}
		select {
		case typed <- b[:n]:
		default: // top does not read
		}
	}
}

// draw replaces the contents of the terminal in one write.
func draw(out *os.File, v *topView, ui *topUI) {
	width, height, err := term.GetSize(int(out.Fd()))
	if err != nil || width == 0 || height == 0 { // 0: unknown, as of a serial console
		width, height = 80, 24
	}
	note := "sorted by " + topSorts[ui.sortBy].name
	if ui.paused {
		note += ", paused"
	}
	lines := v.screen(width, max(height-6, 0), ui.offset, note+"   q quit, s sort, p pause")
	if len(lines) > height {
		lines = lines[:height]
	}
	fmt.Fprint(out, "\x1b[H"+strings.Join(lines, "\x1b[K\r\n")+"\x1b[K\x1b[J")
}
