package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// TestLogEscapes: what others named does nothing to a terminal that shows the log, nor
// begins a line of it.
func TestLogEscapes(t *testing.T) {
	for _, format := range []string{"console", "json"} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		stderr := os.Stderr
		os.Stderr = w
		log, _ := newLogger(&settings{LogFormat: format, LogLevel: zapcore.InfoLevel})
		os.Stderr = stderr
		log.Info("client", zap.String("name", "a\x1b[2J\nERROR\u009b1m\u202eb"))
		w.Close()
		text, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			t.Fatal(err)
		}
		if s := string(text); strings.ContainsAny(s, "\x1b\u009b\u202e") || strings.Count(s, "\n") != 1 || !strings.Contains(s, `\u009b1m\u202eb`) {
			t.Errorf("%s: %q", format, s)
		}
	}
}
