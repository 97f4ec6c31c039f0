package iwarp

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// testStream returns a stream that the peer has opened.
func testStream() *Stream {
	d := &Device{streams: make(map[uint32]*Stream)}
	d.streamReady(&ctrlpb.StreamReady{Conn: 1})
	return d.streams[1]
}

// TestStreamWaits checks that a Read or Write whose context ends does not wait for the one of another goroutine.
func TestStreamWaits(t *testing.T) {
	s := testStream()
	s.reading <- struct{}{} // as Read of another goroutine
	s.writing <- struct{}{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Read(ctx, make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("Read: %v", err)
	}
	if err := s.Write(ctx, make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("Write: %v", err)
	}
}

// TestStreamEOF checks that the end of the connection does not hide that the peer has sent everything.
func TestStreamEOF(t *testing.T) {
	reset := errors.New("reset")
	for _, tt := range []struct {
		end  bool
		want error
	}{{true, io.EOF}, {false, reset}} {
		s := testStream()
		s.data(&ctrlpb.StreamData{End: tt.end})
		s.over(reset)
		if _, err := s.Read(t.Context(), make([]byte, 1)); !errors.Is(err, tt.want) {
			t.Errorf("end %v: %v, want %v", tt.end, err, tt.want)
		}
	}
}

// TestStreamReadFull checks that ReadFull succeeds if it has read everything when the daemon ends.
func TestStreamReadFull(t *testing.T) {
	s := testStream()
	s.d.err = ErrDaemonGone
	s.data(&ctrlpb.StreamData{Data: []byte("all of it")})
	b := make([]byte, 9)
	if err := s.ReadFull(t.Context(), b); err != nil || string(b) != "all of it" {
		t.Errorf("%q, %v", b, err)
	}
}
