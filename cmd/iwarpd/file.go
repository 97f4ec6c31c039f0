package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"
)

// readFile reads the YAML file, rejects unknown keys, and returns the values of allow and slots; v
// gets all others. viper ignores the case of keys: it must see only keys that have been checked.
func readFile(v *viper.Viper, file string) (rules map[string]any, err error) {
	text, err := readBounded(file)
	if errors.Is(err, fs.ErrPermission) {
		return nil, configErr("cannot read the configuration: %w: let the user of the daemon read it", err)
	}
	if err != nil {
		return nil, configErr("cannot read the configuration: %w", err)
	}
	m, err := parseYAML(text)
	if err != nil {
		return nil, configErr("%s: %s", file, oneLine(err.Error()))
	}
	rules = make(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if name == allowKey || name == slotsKey {
			rules[name] = m[name]
			delete(m, name)
			continue
		}
		if err := checkKey(name, m[name]); err != nil {
			return nil, configErr("%s: %w", file, err)
		}
	}
	if err := v.MergeConfigMap(m); err != nil {
		return nil, configErr("%s: %s", file, oneLine(err.Error()))
	}
	return rules, nil
}

// listKeys are the keys that have several values: text with commas, several flags, or in the file a list.
var listKeys = []string{"interface", "interfaces", "queues", "cpus", "crc-peers", "allow-set"}

// checkKey returns an error unless name is that of a key, and value can be its value.
func checkKey(name string, value any) error {
	sub, _ := value.(map[string]any)
	list, isList := value.([]any)
	if !slices.ContainsFunc(keys, func(k key) bool { return k.name == name }) {
		if top, key, dot := strings.Cut(name, "."); dot && (top == allowKey || top == slotsKey) {
			return fmt.Errorf("unknown key %q: write \"%s:\", and \"%s:\" indented below it", name, top, key)
		}
		if len(sub) > 0 {
			name += "." + slices.Sorted(maps.Keys(sub))[0]
		}
		guess, near := nearest(strings.ToLower(name))
		if !near {
			return fmt.Errorf("unknown key %q: iwarpd --help lists the keys, as flags", name)
		}
		return fmt.Errorf("unknown key %q: did you mean %q?", name, guess)
	}
	inList := slices.Contains(listKeys, name)
	switch _, text := value.(string); {
	case text, value == nil:
		return nil
	case isList && inList && !slices.ContainsFunc(list, func(v any) bool { _, text := v.(string); return !text }):
		return nil
	case inList:
		return fmt.Errorf("%s: must be one value, or a list of values", name)
	}
	return fmt.Errorf("%s: must be one value", name)
}

// maxFile bounds the configuration file, which may be named by mistake.
const maxFile = 4 << 20

// readBounded reads a regular file: a FIFO would make the daemon wait for its writer, and be empty at
// the next reload.
func readBounded(file string) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0) // does not block if it is a FIFO
	if err != nil {
		return nil, err
	}
	defer f.Close()
	switch info, err := f.Stat(); {
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, fmt.Errorf("%s: is a directory", file)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s: is not a regular file", file)
	}
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

// asText makes all numbers, booleans and times in n strings, and keys that are null.
func asText(n *yaml.Node) {
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			if key := n.Content[i]; key.ShortTag() == "!!null" { // decoding would skip it
				key.Tag = "!!str"
			}
		}
	}
	if tag := n.ShortTag(); n.Kind == yaml.ScalarNode && tag != "!!null" && tag != "!!merge" {
		n.Tag = "!!str"
	}
	for _, c := range n.Content {
		asText(c)
	}
}
