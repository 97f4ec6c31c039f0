package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// logged returns a logger of a format, and a function that closes its output and returns the text.
func logged(t *testing.T, format string) (*zap.Logger, func() string) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
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
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
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
