package nfs_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestMain sets the umask that NewServer sets, so that files of tests have the same mode whether or not a server ran before.
func TestMain(m *testing.M) {
	unix.Umask(0)
	os.Exit(testenv.RunApart(m))
}
