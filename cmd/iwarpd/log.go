package main

import (
	"fmt"
	"os"
	"slices"
	"time"

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
	core := zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(printable.Writer{W: &lines{f: os.Stderr, encoder: encoder}})), level)
	return zap.New(limitedCore{core, zapcore.NewSamplerWithOptions(core, limitPeriod, limitFirst, limitFirst)}), level
}

// lines writes lines to the log. It does not wait for a reader that does not read, since a caller may hold a lock that
// each request of a client needs. Lines for which there is no room are lost, and counted.
type lines struct {
	f       *os.File
	encoder zapcore.Encoder // of the line that says how many are lost
	lost    uint64          // since the last line that was written
	cut     bool            // the first of them was written in part
}

// atOnce is the number of bytes for which a pipe or socket that is writable has room (PIPE_BUF).
const atOnce = 4096

// patience is how long a line waits for room in total, unless the line before it was lost.
const patience = 100 * time.Millisecond

// Write implements io.Writer. It returns no error for a line that is lost: zap would write the error to standard error,
// without looking for room.
func (l *lines) Write(b []byte) (int, error) {
	end := time.Now()
	if l.lost > 0 && l.room(end) {
		l.writeLost()
	}
	if l.lost == 0 {
		end = end.Add(patience)
	}
	for done := 0; done < len(b); {
		if !l.room(end) {
			l.lost++
			l.cut = l.cut || done > 0
			break
		}
		n, err := l.f.Write(b[done:min(len(b), done+atOnce)])
		if done += n; err != nil {
			return done, err
		}
	}
	return len(b), nil
}

// room reports whether atOnce bytes can be written without waiting for the reader longer than until end.
func (l *lines) room(end time.Time) bool {
	fds := []unix.PollFd{{Fd: int32(l.f.Fd()), Events: unix.POLLOUT}}
	for {
		if n, err := unix.Poll(fds, int(max(time.Until(end), 0).Milliseconds())); err != unix.EINTR {
			return n != 0 // after an error too: Write reports it
		}
	}
}

// writeLost writes how many lines are missing.
func (l *lines) writeLost() {
	entry := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: "lines of the log were lost: its reader did not read them"}
	b, err := l.encoder.EncodeEntry(entry, []zapcore.Field{zap.Uint64("lines", l.lost)})
	if err != nil {
		return
	}
	defer b.Free()
	line := b.Bytes()
	if l.cut {
		line = slices.Insert(line, 0, '\n')
	}
	_, _ = l.f.Write(line)
	l.lost, l.cut = 0, false
}

// limitedCore limits the lines with the same message, except at the level debug: in each
// limitPeriod it writes the first limitFirst of them, and of the others every limitFirst-th. Clients
// and peers can repeat what causes a message without end, and the journal drops any lines of a
// service that writes too many.
type limitedCore struct {
	zapcore.Core
	limited zapcore.Core
}

const (
	limitPeriod = 10 * time.Second
	limitFirst  = 100
)

// With implements zapcore.Core.
func (c limitedCore) With(fields []zapcore.Field) zapcore.Core {
	return limitedCore{c.Core.With(fields), c.limited.With(fields)}
}

// Check implements zapcore.Core.
func (c limitedCore) Check(entry zapcore.Entry, to *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if entry.Level > zapcore.DebugLevel {
		return c.limited.Check(entry, to)
	}
	return c.Core.Check(entry, to)
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

var buffers = buffer.NewPool()

// Clone implements zapcore.Encoder.
func (e journalEncoder) Clone() zapcore.Encoder { return journalEncoder{e.Encoder.Clone()} }

// EncodeEntry implements zapcore.Encoder.
func (e journalEncoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	b, err := e.Encoder.EncodeEntry(entry, fields)
	if err != nil {
		return nil, err
	}
	defer b.Free()
	out := buffers.Get()
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
