package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestBuild checks that the layout is valid, that it has an image for each architecture
// with every file in its place, and that the same files always give the same layout.
func TestBuild(t *testing.T) {
	programs := write(t, map[string]string{
		"amd64/iwarpd": "x86", "amd64/iwarpctl": "ctl", "amd64/iwarpd.yaml": "interface: eth0", "arm64/iwarpd": "arm",
	})
	var digests []string
	for range 2 {
		out := filepath.Join(t.TempDir(), "image")
		if err := build(options{programs, out, "v1.2.3"}); err != nil {
			t.Fatal(err)
		}
		p, err := layout.FromPath(out)
		if err != nil {
			t.Fatal(err)
		}
		root, err := p.ImageIndex()
		if err != nil {
			t.Fatal(err)
		}
		if err := validate.Index(root); err != nil {
			t.Fatal(err)
		}
		m, err := root.IndexManifest()
		if err != nil || len(m.Manifests) != 1 || m.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != "v1.2.3" {
			t.Fatalf("index %+v, %v", m, err)
		}
		digests = append(digests, m.Manifests[0].Digest.String())
		index, err := root.ImageIndex(m.Manifests[0].Digest)
		if err != nil {
			t.Fatal(err)
		}
		images, err := index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		var archs []string
		for _, d := range images.Manifests {
			archs = append(archs, d.Platform.String())
		}
		if !slices.Equal(archs, []string{"linux/amd64", "linux/arm64"}) {
			t.Errorf("platforms %q", archs)
		}
		img, err := index.Image(images.Manifests[0].Digest)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{
			"etc 755", "etc/group 644 root:x:0:", "usr 755", "usr/bin 755", "usr/bin/iwarpctl 755 ctl",
			"usr/sbin 755", "usr/sbin/iwarpd 755 x86", "etc/iwarpd 755", "etc/iwarpd/iwarpd.yaml 644 interface: eth0",
			"etc/passwd 644 root:x:0:0:root:/:/usr/sbin/nologin",
		}
		if got := list(t, mutate.Extract(img)); !slices.Equal(got, want) {
			t.Errorf("files %q; want %q", got, want)
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("two builds differ: %q", digests)
	}
}

func list(t *testing.T, r io.ReadCloser) (out []string) {
	t.Helper()
	defer r.Close()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || !h.ModTime.Equal(epoch) {
			t.Errorf("%s: %d:%d of %v", h.Name, h.Uid, h.Gid, h.ModTime)
		}
		if strings.HasPrefix(h.Name, "usr/share") {
			if path.Base(h.Name) == "sbom.json" && !strings.Contains(string(text), `"bomFormat": "CycloneDX"`) {
				t.Errorf("sbom.json: %s", text)
			}
			continue
		}
		out = append(out, strings.TrimSpace(h.Name+" "+map[int64]string{0o755: "755", 0o644: "644"}[h.Mode]+" "+string(text)))
	}
}

func TestBuildErrors(t *testing.T) {
	for name, files := range map[string]map[string]string{"nothing": {}, "an unknown file": {"amd64/x": ""}} {
		if err := build(options{write(t, files), filepath.Join(t.TempDir(), "image"), "v1"}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := build(options{write(t, map[string]string{"amd64/iwarpd": ""}), t.TempDir(), "v1"}); err == nil {
		t.Error("a folder that exists was written over")
	}
}

// TestSBOM checks that the bill of materials of the test's own program names its modules.
func TestSBOM(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := sbom(filepath.Dir(self), "v1")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"pkg:golang/github.com/google/go-containerregistry@v", "pkg:golang/std@go1.", `"go:sum"`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s in\n%s", want, b)
		}
	}
}
