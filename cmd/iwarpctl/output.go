package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// results wraps the standard output. The first write error ends the command with its own exit code.
type results struct {
	w      io.Writer
	failed func(error)
}

func (r *results) Write(b []byte) (int, error) {
	n, err := r.w.Write(b)
	if err != nil {
		r.failed(err)
	}
	return n, err
}

// file returns the standard output if it is a file or a terminal.
func (c *command) file() (*os.File, bool) {
	w := c.out
	if r, ok := w.(*results); ok {
		w = r.w
	}
	f, ok := w.(*os.File)
	return f, ok
}

// openOutput opens the file name, which a user gave, to be written. It does not wait for the reader of
// a FIFO.
func openOutput(name string, flags int, perm fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(name, flags|os.O_WRONLY|os.O_TRUNC|unix.O_NONBLOCK, perm)
	if errors.Is(err, unix.ENXIO) {
		if st, serr := os.Stat(name); serr == nil && st.Mode()&fs.ModeNamedPipe != 0 {
			err = &fs.PathError{Op: "open", Path: name, Err: errors.New("nothing reads this FIFO: start its reader first")}
		}
	}
	return f, err
}

// gbit returns a rate in Gbit/s.
func gbit(n int64, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return float64(n) * 8 / 1e9 / seconds
}

// rate formats a rate.
func rate(n int64, seconds float64) string {
	if seconds <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f MiB/s (%.2f Gbit/s)", float64(n)/seconds/(1<<20), gbit(n, seconds))
}

// encoder returns a JSON encoder that also escapes C1 control and bidirectional formatting
// characters, which encoding/json does not.
func encoder(w io.Writer) *json.Encoder { return json.NewEncoder(printable.Writer{W: w}) }

// A jsonList prints the elements of a JSON array one by one: there may be more than fit into memory.
type jsonList struct {
	w     io.Writer
	begun bool
}

func (l *jsonList) add(v any) error {
	b, err := json.MarshalIndent(v, "  ", "  ")
	if err != nil {
		return err
	}
	before := ",\n  "
	if !l.begun {
		l.begun, before = true, "[\n  "
	}
	_, err = printable.Writer{W: l.w}.Write(append([]byte(before), b...))
	return err
}

// end ends the array, which may be empty.
func (l *jsonList) end() error {
	last := "\n]\n"
	if !l.begun {
		last = "[]\n"
	}
	_, err := io.WriteString(l.w, last)
	return err
}

// printTable prints rows under a header. It right-aligns numbers and escapes non-printable
// characters.
func printTable(w io.Writer, header []string, rows [][]any) {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	style := table.StyleDefault
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format.Header = text.FormatDefault
	style.Box.PaddingLeft, style.Box.PaddingRight = "", " "
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	head := make(table.Row, len(header))
	for i, h := range header {
		head[i] = h
	}
	t.AppendHeader(head)
	for _, r := range rows {
		for i, cell := range r {
			if s, ok := cell.(string); ok {
				r[i] = printable.String(s)
			}
		}
		t.AppendRow(r)
	}
	t.Render()
}

// A bar shows progress on a terminal, and does nothing elsewhere.
type bar struct {
	w     io.Writer // nil: not a terminal
	name  string
	width int

	mu    sync.Mutex
	began time.Time
	drawn time.Time
}

func (c *command) newBar(name string) *bar {
	b := &bar{name: printable.String(name), began: time.Now()}
	f, ok := c.err.(*os.File)
	if !ok || c.json || !term.IsTerminal(int(f.Fd())) {
		return b
	}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && width >= 40 {
		b.w, b.width = f, width
	}
	return b
}

// redraw is how often the bar may change.
const redraw = 100 * time.Millisecond

func (b *bar) update(done, total int64) {
	if b.w == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if now.Sub(b.drawn) < redraw && done < total {
		return
	}
	b.drawn = now
	fmt.Fprint(b.w, "\r", b.line(done, total, now.Sub(b.began)))
}

// line formats the bar within the width of the terminal.
func (b *bar) line(done, total int64, took time.Duration) string {
	part := 1.0
	if total > 0 {
		part = float64(done) / float64(total)
	}
	left := "--:--"
	if done > 0 {
		s := int(took.Seconds() * (1 - part) / part)
		left = fmt.Sprintf("%d:%02d", s/60, s%60)
	}
	tail := fmt.Sprintf(" %3.0f%%  %.1f MiB/s  %s", part*100, float64(done)/(1<<20)/max(took.Seconds(), 1e-3), left)
	name := text.Trim(b.name, b.width/3)
	room := b.width - 1 - text.StringWidth(name) - len(tail) - len(" []")
	if room < 5 {
		return name + tail
	}
	full := min(int(part*float64(room)), room)
	return name + " [" + strings.Repeat("#", full) + strings.Repeat(".", room-full) + "]" + tail
}

// clear erases the bar.
func (b *bar) clear() {
	if b.w != nil {
		fmt.Fprint(b.w, "\r", strings.Repeat(" ", b.width-1), "\r")
	}
}
