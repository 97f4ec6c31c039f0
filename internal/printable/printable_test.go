package printable

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"unicode"
)

// TestCount checks that one thing has no plural.
func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0 queues", 1: "1 queue", 2: "2 queues"} {
		if got := Count(n, "queue"); got != want {
			t.Errorf("got %q; want %q", got, want)
		}
	}
}

func TestString(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"", ""},
		{"ping -c", "ping -c"},
		{"grün 鯨", "grün 鯨"},
		{"\x1b[2J\a", `\u001b[2J\u0007`},
		{"a\nb\tc\r", `a\u000ab\u0009c\u000d`},
		{"\u009b31m", `\u009b31m`},                   // CSI in one character
		{"a\u202egnp.exe", `a\u202egnp.exe`},         // right-to-left override
		{"\u2028\u00a0\ufeff", `\u2028\u00a0\ufeff`}, // spaces and separators
		{"\U000e0041", `\udb40\udc41`},               // a tag
		{"a\xffb\xed\xa0\x80", "a\ufffdb\ufffd\ufffd\ufffd"},
	} {
		got := String(tt.in)
		if got != tt.want {
			t.Errorf("%q: %q; want %q", tt.in, got, tt.want)
		}
		var back string
		if err := json.Unmarshal([]byte(`"`+got+`"`), &back); err != nil || back != strings.ToValidUTF8(tt.in, "\ufffd") && !strings.Contains(tt.in, "\xff") {
			t.Errorf("%q: JSON reads it as %q, %v", tt.in, back, err)
		}
	}
	var b strings.Builder
	if n, err := (Writer{&b}).Write([]byte("one\ttwo\x1b\n")); n != 9 || err != nil || b.String() != "one\ttwo\\u001b\n" {
		t.Errorf("Writer: %d, %v, %q", n, err, b.String())
	}
}

func TestError(t *testing.T) {
	for in, want := range map[string]string{
		"ctrl: no queue pair 9":                                  "no queue pair 9",
		"iwarp: connect: ctrl: connect to 1.2.3.4: tcp: refused": "connect: connect to 1.2.3.4: tcp: refused",
		"ctrl: hostnet: no route":                                "no route",
		"a\nbpf: b (shm: c)":                                     "a\nb (c)",
		"cannot open /x/ctrl: no such file":                      "cannot open /x/ctrl: no such file",
	} {
		if got := Error(errors.New(in)); got != want {
			t.Errorf("%q: %q; want %q", in, got, want)
		}
	}
}

func TestReason(t *testing.T) {
	other := errors.New("other")
	for _, c := range []struct{ in, want error }{
		{&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, syscall.ECONNREFUSED},
		{&os.PathError{Op: "open", Path: "/x", Err: syscall.ENOENT}, syscall.ENOENT},
		{other, other}, {nil, nil},
	} {
		if got := Reason(c.in); got != c.want {
			t.Errorf("%v: %v; want %v", c.in, got, c.want)
		}
	}
}

func FuzzString(f *testing.F) {
	f.Add("\x1b]0;x\a\u202e\xff")
	f.Fuzz(func(t *testing.T, s string) {
		for _, r := range String(s) {
			if !unicode.IsPrint(r) {
				t.Fatalf("%q: %q is left", s, r)
			}
		}
	})
}
