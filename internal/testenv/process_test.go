package testenv

import (
	"os/exec"
	"syscall"
	"testing"
	"time"
)

func TestProcess(t *testing.T) {
	p := Start(t, exec.Command("sh", "-c", `echo one; read x; trap "echo three >&2; exit 3" TERM; echo two; while :; do :; done`))
	p.Expect("two") // standard input is empty
	p.Signal(syscall.SIGTERM)
	p.Expect("three")
	if code := p.Wait(time.Minute); code != 3 || p.String() != "one\ntwo\nthree\n" {
		t.Errorf("exit code %d: %q", code, p)
	}
	Start(t, exec.Command("true")).Succeed()

	r := &recorder{TB: t}
	failed := func(f func(p *Process)) bool {
		r.failed = false
		p := Start(r, exec.Command("sh", "-c", "echo no; exit 1"))
		<-p.Done
		defer func() { _ = recover() }()
		f(p)
		return r.failed
	}
	if !failed(func(p *Process) { p.Expect("yes") }) {
		t.Error("Expect finds what was not printed")
	}
	if !failed(func(p *Process) { p.Succeed() }) {
		t.Error("Succeed takes exit code 1")
	}
}
