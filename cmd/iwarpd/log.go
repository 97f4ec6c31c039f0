package main

import (
	"os"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// newLogger writes to standard error, where systemd and terminals look, and escapes what
// does not print. Its level can be changed.
func newLogger(s *settings) (*zap.Logger, zap.AtomicLevel) {
	level := zap.NewAtomicLevelAt(s.LogLevel)
	enc := zap.NewProductionEncoderConfig()
	enc.EncodeTime = zapcore.ISO8601TimeEncoder
	enc.EncodeDuration = zapcore.StringDurationEncoder
	var encoder zapcore.Encoder
	if s.LogFormat == "json" {
		encoder = zapcore.NewJSONEncoder(enc)
	} else {
		enc.EncodeLevel = zapcore.CapitalLevelEncoder
		encoder = zapcore.NewConsoleEncoder(enc)
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(printable.Writer{W: os.Stderr})), level)), level
}
