package main

import (
	"fmt"
	"os"
	"slices"

	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// newLogger returns a logger that writes to standard error and escapes non-printable characters,
// and its level, which can be changed.
// The journal adds a time and a priority to each line, so lines for it begin with
// the priority instead of time and level.
func newLogger(s *settings) (*zap.Logger, zap.AtomicLevel) {
	level := zap.NewAtomicLevelAt(s.LogLevel)
	enc := zap.NewProductionEncoderConfig()
	enc.EncodeTime = zapcore.ISO8601TimeEncoder
	enc.EncodeDuration = zapcore.StringDurationEncoder
	journal := inJournal(os.Stderr)
	var encoder zapcore.Encoder
	if s.LogFormat == "json" {
		encoder = zapcore.NewJSONEncoder(enc)
	} else {
		enc.EncodeLevel = zapcore.CapitalLevelEncoder
		if journal {
			enc.TimeKey, enc.LevelKey = zapcore.OmitKey, zapcore.OmitKey
		}
		encoder = zapcore.NewConsoleEncoder(enc)
	}
	encoder = plainEncoder{encoder}
	if journal {
		encoder = journalEncoder{encoder}
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(printable.Writer{W: os.Stderr})), level)), level
}

// inJournal reports whether f is the stream that systemd has connected to the journal
// (JOURNAL_STREAM in systemd.exec(5)).
func inJournal(f *os.File) bool {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return false
	}
	return os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// plainEncoder writes errors without names of Go packages.
type plainEncoder struct{ zapcore.Encoder }

// Clone implements zapcore.Encoder.
func (e plainEncoder) Clone() zapcore.Encoder { return plainEncoder{e.Encoder.Clone()} }

// EncodeEntry implements zapcore.Encoder.
func (e plainEncoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	fields = slices.Clone(fields)
	for i, f := range fields {
		if err, ok := f.Interface.(error); ok && f.Type == zapcore.ErrorType {
			fields[i] = zap.String(f.Key, printable.Error(err))
		}
	}
	return e.Encoder.EncodeEntry(entry, fields)
}

// journalEncoder puts the priority of sd-daemon(3) before each line.
type journalEncoder struct{ zapcore.Encoder }

var lines = buffer.NewPool()

// Clone implements zapcore.Encoder.
func (e journalEncoder) Clone() zapcore.Encoder { return journalEncoder{e.Encoder.Clone()} }

// EncodeEntry implements zapcore.Encoder.
func (e journalEncoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	b, err := e.Encoder.EncodeEntry(entry, fields)
	if err != nil {
		return nil, err
	}
	defer b.Free()
	out := lines.Get()
	out.AppendString(priority(entry.Level))
	_, err = out.Write(b.Bytes())
	return out, err
}

// priority returns the prefix of a line of level l.
func priority(l zapcore.Level) string {
	switch {
	case l >= zapcore.DPanicLevel:
		return "<2>"
	case l == zapcore.ErrorLevel:
		return "<3>"
	case l == zapcore.WarnLevel:
		return "<4>"
	case l == zapcore.InfoLevel:
		return "<6>"
	}
	return "<7>"
}
