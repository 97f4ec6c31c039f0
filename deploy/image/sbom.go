package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// sbom returns the bill of materials, as CycloneDX JSON, of the Go programs in
// dir: every module that the linker put into one of them, with the checksum by
// which Go verified it.
func sbom(dir, version string) ([]byte, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	parts := make(map[string]cdx.Component) // by package URL
	for _, e := range entries {
		info, err := buildinfo.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // no Go program
		}
		add(parts, "std", info.GoVersion, "")
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			add(parts, m.Path, m.Version, m.Sum)
		}
	}
	components := make([]cdx.Component, 0, len(parts))
	for _, url := range slices.Sorted(maps.Keys(parts)) {
		components = append(components, parts[url])
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &cdx.Component{Type: cdx.ComponentTypeApplication, Name: "iwarpd", Version: version}}
	bom.Components = &components
	var b bytes.Buffer
	enc := cdx.NewBOMEncoder(&b, cdx.BOMFileFormatJSON)
	enc.SetPretty(true)
	err = enc.Encode(bom)
	return b.Bytes(), err
}

func add(parts map[string]cdx.Component, path, version, sum string) {
	if version == "" || version == "(devel)" {
		return // of this repository
	}
	c := cdx.Component{
		Type: cdx.ComponentTypeLibrary, Name: path, Version: version,
		PackageURL: fmt.Sprintf("pkg:golang/%s@%s", path, version),
	}
	c.BOMRef = c.PackageURL
	if sum != "" {
		c.Properties = &[]cdx.Property{{Name: "go:sum", Value: sum}}
	}
	parts[c.PackageURL] = c
}
