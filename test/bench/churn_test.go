package main

import (
	"io"
	"net"
	"net/http"
	"path/filepath"
	"testing"
)

// TestCollections checks that collections finds the metric among others, and fails without it.
func TestCollections(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metrics")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	text := "# TYPE go_gc_duration_seconds summary\ngo_gc_duration_seconds{quantile=\"0\"} 3e-05\ngo_gc_duration_seconds_sum 7\n"
	s := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, text)
	})}
	go func() { _ = s.Serve(l) }()
	defer s.Close()
	if _, err := collections(path); err == nil {
		t.Error("no error without the metric")
	}
	text += "go_gc_duration_seconds_count 12\ngo_goroutines 30\n"
	if n, err := collections(path); n != 12 || err != nil {
		t.Errorf("%d, %v; want 12", n, err)
	}
}
