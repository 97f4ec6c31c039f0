package verbs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestRunMistakes checks what iwarpd-run says of a program that it cannot run, and its exit status, which is the shell's.
func TestRunMistakes(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		program string
		code    int
		want    string
	}{
		{"iwarp-no-such-program", 127, "no such program: install it, or give its path"},
		{filepath.Join(dir, "none"), 127, "no such file: check the path"},
		{dir, 126, "is not a program"},
		{text, 126, "may not be executed: chmod +x it, or give the interpreter first"},
		{"true", 0, ""},
	} {
		out, err := exec.Command("sh", "../../client/verbs/iwarpd-run.in", tt.program).CombinedOutput()
		code := 0
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			code = e.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		want := ""
		if tt.want != "" {
			want = "iwarpd-run: " + tt.program + ": " + tt.want + "\n"
		}
		if code != tt.code || string(out) != want {
			t.Errorf("%s: exit status %d, %q; want %d, %q", tt.program, code, out, tt.code, want)
		}
	}
}
