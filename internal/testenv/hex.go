package testenv

import (
	"encoding/hex"
	"strings"
	"testing"
)

// Unhex returns the bytes that s has as hexadecimal digits. White space between them is ignored.
func Unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
