package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"
)

// readFile reads the YAML file and rejects unknown keys.
func readFile(v *viper.Viper, file string) error {
	text, err := readBounded(file)
	if errors.Is(err, fs.ErrPermission) {
		return configErr("cannot read the configuration: %w: let the user of the daemon read it", err)
	}
	if err != nil {
		return configErr("cannot read the configuration: %w", err)
	}
	m, err := parseYAML(text)
	if err == nil {
		err = v.MergeConfigMap(m)
	}
	if err != nil {
		return configErr("%s: %s", file, oneLine(err.Error()))
	}
	for name := range m {
		if top, key, dot := strings.Cut(name, "."); dot { // viper would take it for a key of top, and nothing would read it
			return configErr("%s: unknown key %q: write \"%s:\", and \"%s:\" indented below it", file, name, top, key)
		}
	}
	for _, name := range v.AllKeys() {
		if top, _, _ := strings.Cut(name, "."); top == allowKey || top == slotsKey {
			continue
		}
		if !slices.ContainsFunc(keys, func(k key) bool { return k.name == name }) {
			return configErr("%s: unknown key %q: did you mean %q?", file, name, nearest(name))
		}
		switch value := v.Get(name).(type) {
		case []any, map[string]any:
			if _, list := value.([]any); list && (name == "interfaces" || name == "allow-set") {
				continue
			}
			return configErr("%s: %s: must be one value; write a list as a string like \"0,2-3\"", file, name)
		}
	}
	return nil
}

// maxFile bounds the configuration file, since a device that is named by mistake may be endless.
const maxFile = 4 << 20

func readBounded(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if len(text) > maxFile {
		err = fmt.Errorf("%s has more than %d MiB: is that the right file?", file, maxFile>>20)
	}
	return text, err
}

// parseYAML returns the keys of a YAML document. Values are text as it was typed, nil, lists and
// maps of these: errors quote them, and a number would have other digits after YAML had parsed it.
func parseYAML(text []byte) (m map[string]any, err error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	for i := 0; ; i++ {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return m, nil
		}
		if err == nil {
			root := doc.Content[0]
			switch {
			case root.ShortTag() == "!!null":
				continue
			case i > 0: // only the first one would be read
				return nil, errors.New("more than one YAML document: remove the line \"---\" between them")
			case root.Kind != yaml.MappingNode:
				return nil, errors.New("must have keys like \"interface: eth0\"")
			}
			if err := checkMode(root.Content); err != nil {
				return nil, err
			}
			asText(root)
			err = root.Decode(&m)
		}
		if err != nil {
			why := strings.TrimPrefix(strings.TrimPrefix(err.Error(), "yaml: "), "unmarshal errors:\n")
			if bytes.Contains(text, []byte("\t")) && strings.Contains(why, "cannot start any token") {
				why += ": indent with spaces, not with tabs"
			}
			return nil, errors.New("not YAML: " + why)
		}
	}
}

// checkMode returns an error if socket-mode is a number: a program that wrote the file may have
// written 0660 as 432. pairs are the keys and values of the file.
func checkMode(pairs []*yaml.Node) error {
	for i := 0; i+1 < len(pairs); i += 2 {
		if key, value := pairs[i], pairs[i+1]; key.Value == "socket-mode" && value.ShortTag() == "!!int" {
			return fmt.Errorf("socket-mode is %s: put it in quotes, like \"0660\"", value.Value)
		}
	}
	return nil
}

// asText makes all numbers, booleans and times in n strings.
func asText(n *yaml.Node) {
	if tag := n.ShortTag(); n.Kind == yaml.ScalarNode && tag != "!!null" && tag != "!!merge" {
		n.Tag = "!!str"
	}
	for _, c := range n.Content {
		asText(c)
	}
}
