// Command image builds an OCI image of iwarpd, for several architectures, into a
// folder in OCI layout, with a bill of materials in each image. The same programs give the same image, byte for byte:
// nothing in it depends on the time or the machine.
package main

import (
	"archive/tar"
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	var o options
	flag.StringVar(&o.programs, "programs", "", "folder with one folder for each architecture, as Go names it, that holds the programs")
	flag.StringVar(&o.out, "out", "", "folder of the OCI layout; it must not exist")
	flag.StringVar(&o.version, "version", "devel", "version of the programs")
	flag.Parse()
	if o.programs == "" || o.out == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "usage: image -programs DIR -out DIR [-version V]")
		os.Exit(2)
	}
	if err := build(o); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

type options struct{ programs, out, version string }

// epoch is the time of everything in the image.
var epoch = time.Unix(0, 0).UTC()

// build writes one image for each folder of o.programs, and an index of them.
func build(o options) error {
	archs, err := os.ReadDir(o.programs)
	if err != nil {
		return err
	}
	if len(archs) == 0 {
		return fmt.Errorf("%s holds no architecture", o.programs)
	}
	if _, err := os.Stat(o.out); err == nil {
		return fmt.Errorf("%s exists: remove it", o.out)
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range archs {
		img, err := imageOf(filepath.Join(o.programs, arch.Name()), arch.Name(), o.version)
		if err != nil {
			return fmt.Errorf("%s: %w", arch.Name(), err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch.Name()}},
		})
	}
	// The layout's index names the image index, as "skopeo copy oci:DIR:VERSION" wants it.
	p, err := layout.Write(o.out, empty.Index)
	if err != nil {
		return err
	}
	return p.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": tag(o.version)}))
}

// tag turns a version into the tag of an image, which may have neither + nor ~.
func tag(version string) string { return strings.NewReplacer("+", "-", "~", "-").Replace(version) }

func imageOf(dir, arch, version string) (v1.Image, error) {
	materials, err := sbom(dir, version)
	if err != nil {
		return nil, err
	}
	// The configuration may name root: there is no name service to ask.
	made := map[string]string{
		"sbom.json": string(materials), "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\n", "group": "root:x:0:\n",
	}
	for name, text := range made {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	content, err := contents(dir)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	if img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "deploy/image"}}); err != nil {
		return nil, err
	}
	return mutate.ConfigFile(img, configFile(img, arch, version))
}

func configFile(img v1.Image, arch, version string) *v1.ConfigFile {
	c, err := img.ConfigFile()
	if err != nil {
		panic(err) // of an image in memory
	}
	c = c.DeepCopy()
	c.OS, c.Architecture, c.Created = "linux", arch, v1.Time{Time: epoch}
	c.Config = v1.Config{
		Entrypoint: []string{"/usr/sbin/iwarpd"},
		Cmd:        []string{"--config", "/etc/iwarpd/iwarpd.yaml"},
		Env:        []string{"PATH=/usr/sbin:/usr/bin"},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":    "iwarpd",
			"org.opencontainers.image.version":  version,
			"org.opencontainers.image.source":   "https://github.com/iwarpd/iwarpd",
			"org.opencontainers.image.licenses": "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
		},
	}
	return c
}

// places maps each folder of programs to its place in the image.
var places = map[string]string{
	"iwarpd": "usr/sbin/iwarpd", "iwarpctl": "usr/bin/iwarpctl", "iwarpd-device-plugin": "usr/bin/iwarpd-device-plugin",
	"passwd": "etc/passwd", "group": "etc/group", "iwarpd.yaml": "etc/iwarpd/iwarpd.yaml",
	"LICENSE": "usr/share/doc/iwarpd/LICENSE", "sbom.json": "usr/share/doc/iwarpd/sbom.json",
}

// contents returns the one layer as a tar archive.
func contents(dir string) ([]byte, error) {
	entries, err := os.ReadDir(dir) // in order of name
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	made := make(map[string]bool)
	for _, e := range entries {
		place, ok := places[e.Name()]
		if !ok {
			return nil, fmt.Errorf("no place for %s", e.Name())
		}
		parts := strings.Split(place, "/")
		for i := 1; i < len(parts); i++ {
			folder := strings.Join(parts[:i], "/") + "/"
			if made[folder] {
				continue
			}
			made[folder] = true
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: folder, Mode: 0o755, ModTime: epoch, Format: tar.FormatPAX}); err != nil {
				return nil, err
			}
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		mode := int64(0o644)
		if strings.Contains(place, "bin/") {
			mode = 0o755
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: place, Mode: mode, Size: int64(len(data)), ModTime: epoch, Format: tar.FormatPAX}); err != nil {
			return nil, err
		}
		if _, err := w.Write(data); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}
