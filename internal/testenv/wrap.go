package testenv

import (
	"fmt"
	"regexp"
	"testing"
)

// wrapped matches what stands in for a function f in a program in C: the prototype of __wrap_f, or WRAP(type, f, ...).
var wrapped = regexp.MustCompile(`(?m)\b__wrap_(\w+)\(.*;$|^WRAP\([^,]*, (\w+)`)

// Wrapping returns the option of gcc that links what is to call the functions of the program in C at path that stand in for others.
func Wrapping(t testing.TB, path string) string {
	t.Helper()
	option := "-Wl"
	for _, m := range wrapped.FindAllSubmatch(ReadFile(t, path), -1) {
		option += fmt.Sprintf(",--wrap=%s%s", m[1], m[2])
	}
	return option
}
