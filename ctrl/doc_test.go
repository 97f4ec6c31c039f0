package ctrl

import (
	"fmt"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestDocument compares the numbers of the control API in docs/api.md with the
// code; those of the rings are compared in shm.
func TestDocument(t *testing.T) {
	text := testenv.ReadFile(t, "../docs/api.md")
	doc := string(text)
	row := func(n int32, name string) {
		t.Helper()
		if want := fmt.Sprintf("\n| %d | %s |", n, name); strings.Count(doc, want) != 1 {
			t.Errorf("the document has %q %d times", want, strings.Count(doc, want))
		}
	}
	for n, name := range ctrlpb.Code_name {
		if n != 0 {
			row(n, strings.TrimPrefix(name, "CODE_"))
		}
	}
	for n, name := range ctrlpb.AsyncKind_name {
		if n != 0 {
			row(n, strings.TrimPrefix(name, "ASYNC_"))
		}
	}
	for _, number := range []string{
		fmt.Sprintf("at most %d at a time", maxChunk), fmt.Sprintf("more than %d KiB are not acknowledged yet", maxUnsent>>10),
		fmt.Sprintf("unread: more than %d messages", maxQueued), fmt.Sprintf("its length and %d bytes", messageOverhead),
		fmt.Sprintf("reads within %d ms", cutOffWait.Milliseconds()),
	} {
		if !strings.Contains(doc, number) {
			t.Errorf("the document does not say %q", number)
		}
	}
	// The record of a captured frame, field by field.
	b := appendRecord(nil, &dataplane.TapFrame{Worker: 0x0102, Out: true, Size: 0x03040506, Data: []byte{7}}, 0x08090a0b0c0d0e0f)
	if got := fmt.Sprintf("%x", b[8:]); got != "0f0e0d0c0b0a0908"+"06050403"+"0201"+"01"+"00"+"07" {
		t.Errorf("record %s", got)
	}
	for _, field := range []string{"| 0 | 8 | time |", "| 8 | 8 | dropped |", "| 16 | 4 | size |", "| 20 | 2 | worker |", "| 22 | 1 | direction |", "| 24 | - | frame |"} {
		if !strings.Contains(doc, field) {
			t.Errorf("the document has no field %q", field)
		}
	}
}
