package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReports(t *testing.T) {
	for _, tc := range []struct {
		order string
		want  bool
	}{
		{"9\n", true},
		{"0\n", true},
		{"4294967295\n", false}, // no hypervisor asked
		{"-1\n", false},
		{"", false},
	} {
		file := filepath.Join(t.TempDir(), "order")
		if err := os.WriteFile(file, []byte(tc.order), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := reports(file); got != tc.want {
			t.Errorf("reports with the order %q = %v, want %v", tc.order, got, tc.want)
		}
	}
	if reports(filepath.Join(t.TempDir(), "none")) {
		t.Error("reports without the parameter = true, want false")
	}
}

func TestMemFree(t *testing.T) {
	file := filepath.Join(t.TempDir(), "meminfo")
	if err := os.WriteFile(file, []byte("MemTotal:       100 kB\nMemFree:         64 kB\nMemAvailable:    80 kB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := memFree(file); n != 64<<10 || err != nil {
		t.Errorf("memFree = %d, %v, want 65536, nil", n, err)
	}
	if err := os.WriteFile(file, []byte("MemTotal: 100 kB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := memFree(file); err == nil {
		t.Error("memFree without MemFree: no error")
	}
}
