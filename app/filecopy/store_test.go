package filecopy

import (
	"errors"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestNoNewFiles checks the error for a folder that exists but in which the kernel makes no files.
func TestNoNewFiles(t *testing.T) {
	testenv.RequireRoot(t) // others get a permission error
	s, err := OpenStore("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, name := range []string{"f", "sys/f"} {
		_, err := s.Create(name, 1, Options{})
		var e *Error
		if !errors.As(err, &e) || e.Code != CodePermission || !strings.HasPrefix(err.Error(), name+": its folder was removed, or the file system there takes no new files") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
