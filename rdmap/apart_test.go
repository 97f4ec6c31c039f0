package rdmap

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestReadQueuesApart checks that the Read Requests of one stream use no slots of another's queue and are answered
// independently, in whatever order the streams send (RFC 5040 section 8.1.2).
func TestReadQueuesApart(t *testing.T) {
	const streams, ird = 3, 4
	var es [streams]*end
	for i := range es {
		es[i] = newEnd(Config{IRD: ird})
		es[i].mem.regions[6] = &region{buf: bytes.Repeat([]byte{byte(i + 1)}, ird), read: true}
	}
	for k := range ird {
		for i, e := range es {
			in := testenv.Unhex(t, fmt.Sprintf("4141 00000000 00000001 %08x 00000000 %08x %016x 00000001 00000006 %016x", k+1, 7+i, 16*k, k))
			if err := e.HandleULPDU(in); err != nil {
				t.Fatalf("stream %d, Read %d within its IRD: %v", i, k, err)
			}
		}
	}
	for i := streams - 1; i >= 0; i-- {
		for k := range ird {
			want := testenv.Unhex(t, fmt.Sprintf("c142 %08x %016x %02x", 7+i, 16*k, i+1))
			if got := es[i].poll(testMULPDU); !bytes.Equal(got, want) {
				t.Errorf("stream %d, answer %d: %x; want %x", i, k, got, want)
			}
		}
		if more := es[i].poll(testMULPDU); more != nil {
			t.Errorf("stream %d: and then %x", i, more)
		}
	}
}
