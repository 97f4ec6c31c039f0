package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// logged returns a logger of a format, and a function that closes its output and returns the text.
func logged(t *testing.T, format string) (*zap.Logger, func() string) {
	t.Helper()
	r, w := testenv.Pipe(t)
	stderr := os.Stderr
	os.Stderr = w
	log, _ := newLogger(&settings{LogFormat: format, LogLevel: zapcore.InfoLevel})
	os.Stderr = stderr
	return log, func() string {
		w.Close()
		defer r.Close()
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
}

// TestLogEscapes checks that names that others chose can neither control a terminal that shows the log nor begin a line
// of it.
func TestLogEscapes(t *testing.T) {
	for _, format := range []string{"console", "json"} {
		log, read := logged(t, format)
		log.Info("client", zap.String("name", "a\x1b[2J\nERROR\u009b1m\u202eb"))
		if s := read(); strings.ContainsAny(s, "\x1b\u009b\u202e") || strings.Count(s, "\n") != 1 || !strings.Contains(s, `\u009b1m\u202eb`) {
			t.Errorf("%s: %q", format, s)
		}
	}
}

// TestLogLimit checks that a message that clients repeat does not displace the others.
func TestLogLimit(t *testing.T) {
	log, read := logged(t, "console")
	const times = 500
	for i := range times {
		log.With(zap.Int("client", i)).Info("stream terminated")
	}
	log.Info("ready")
	text := read()
	if n := strings.Count(text, "stream terminated"); n < limitFirst || n > limitFirst+times/limitFirst {
		t.Errorf("%d lines of %d", n, times)
	}
	if !strings.Contains(text, "ready") {
		t.Error("another message is lost")
	}
}

// TestLogStalls checks that a line waits for no reader, however long it is, and that the log says how many lines are
// missing once it is read again.
func TestLogStalls(t *testing.T) {
	for _, length := range []int{1000, 3 * atOnce, 1 << 20} {
		t.Run(fmt.Sprint(length), func(t *testing.T) { testLogStalls(t, length) })
	}
}

func testLogStalls(t *testing.T, length int) {
	r, w := testenv.Pipe(t)
	defer w.Close()
	stderr := os.Stderr
	os.Stderr = w
	log, _ := newLogger(&settings{LogFormat: "json", LogLevel: zapcore.InfoLevel})
	os.Stderr = stderr
	size, err := unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := 2*size/length + 2
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range all {
			log.Info(fmt.Sprintf("line %d", i), zap.String("text", strings.Repeat("x", length)))
		}
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("a line waits for the reader")
	}
	size, err = unix.IoctlGetInt(int(r.Fd()), unix.TIOCINQ)
	if err != nil {
		t.Fatal(err)
	}
	before := make([]byte, size)
	if _, err := io.ReadFull(r, before); err != nil {
		t.Fatal(err)
	}
	log.Info("after")
	w.Close()
	after, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	lost := all - strings.Count(string(before), "\n")
	// A line that was written in part is a line of its own.
	lines := strings.Split(strings.TrimPrefix(string(after), "\n"), "\n")
	if cut := before[len(before)-1] != '\n'; cut != strings.HasPrefix(string(after), "\n") {
		t.Errorf("a line was cut: %v, and then came %.100q", cut, after)
	}
	if len(lines) != 3 || !strings.Contains(lines[0], fmt.Sprintf(`its reader did not read them","lines":%d`, lost)) || !strings.Contains(lines[1], "after") {
		t.Errorf("%d lines are lost: %.1000s", lost, after)
	}
}

// TestLogSlowReader checks that a long line waits for a slow reader no longer than a short one does.
func TestLogSlowReader(t *testing.T) {
	r, w := testenv.Pipe(t)
	defer w.Close()
	go func() {
		b := make([]byte, atOnce)
		for _, err := r.Read(b); err == nil; _, err = r.Read(b) {
			time.Sleep(patience / 5)
		}
	}()
	const length = 1 << 20 // which takes the reader fifty times as long as a line waits
	l := &lines{f: w}
	if n, err := l.Write(make([]byte, length)); n != length || err != nil || l.lost != 1 || !l.cut {
		t.Errorf("%d, %v; lines lost: %d, cut: %v", n, err, l.lost, l.cut)
	}
}

// TestLogErrors checks that errors are logged without names of Go packages, and that names of protocols stay.
func TestLogErrors(t *testing.T) {
	for format, want := range map[string]string{"console": `{"error": "no such peer: tcp: refused"}`, "json": `"error":"no such peer: tcp: refused"`} {
		log, read := logged(t, format)
		log.Warn("beware", zap.Error(fmt.Errorf("ctrl: %w", fmt.Errorf("no such peer: dataplane: %w", errors.New("tcp: refused")))))
		if text := read(); !strings.Contains(text, want) {
			t.Errorf("%s: %q; want %q", format, text, want)
		}
	}
}

// TestJournal checks that lines for the journal begin with their priority and have no second time stamp.
func TestJournal(t *testing.T) {
	for format, want := range map[string]string{"console": "<4>beware\t{\"n\": 1}\n", "json": `<4>{"level":"warn"`} {
		r, w := testenv.Pipe(t)
		var st unix.Stat_t
		if err := unix.Fstat(int(w.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
		stderr := os.Stderr
		os.Stderr = w
		log, _ := newLogger(&settings{LogFormat: format, LogLevel: zapcore.InfoLevel})
		os.Stderr = stderr
		log.Warn("beware", zap.Int("n", 1))
		w.Close()
		text, err := io.ReadAll(r)
		r.Close()
		if err != nil || !strings.HasPrefix(string(text), want) {
			t.Errorf("%s: %q, %v; want %q", format, text, err, want)
		}
		if inJournal(stderr) {
			t.Error("another file is taken for the journal")
		}
	}
}
