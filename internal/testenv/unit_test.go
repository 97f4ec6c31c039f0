package testenv

import (
	"errors"
	"os/exec"
	"syscall"
	"testing"
)

// TestUnit checks what becomes of a program that makes a system call which its unit does not allow: systemd ends it, unless the
// unit has SystemCallErrorNumber=.
func TestUnit(t *testing.T) {
	for file, ends := range map[string]bool{"units/iwarpctl-perf.service": true, "iwarpd.service": false} {
		for _, more := range [][]string{nil, {"chroot"}} {
			args := append(Unit(t, "../../deploy/"+file, more...), RequireTool(t, "chroot"), "/", "/bin/true")
			err := exec.Command(args[0], args[1:]...).Run()
			killed := false
			if e, ok := errors.AsType[*exec.ExitError](err); ok {
				killed = e.Sys().(syscall.WaitStatus).Signal() == syscall.SIGSYS
			}
			if killed != (ends && more == nil) {
				t.Errorf("%s: a program that calls chroot, allowed %v: %v", file, more, err)
			}
		}
	}
}
