// Package printable escapes untrusted text before it is displayed, so that the name of a program or
// peer cannot move the cursor of a terminal, forge a log line, or reverse the direction of the text
// that follows.
package printable

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Count returns a number of things: "1 queue", "2 queues".
func Count[N ~int | ~int64 | ~uint32 | ~uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// String returns s with each non-printable character replaced by \uXXXX, as in JSON, so that the
// result is valid in JSON strings too. U+0020 is the only space character that is not escaped.
func String(s string) string { return escape(s, "") }

// escape is String, except that the characters in keep are not escaped.
func escape(s, keep string) string {
	fine := func(r rune) bool { return unicode.IsPrint(r) || strings.ContainsRune(keep, r) }
	if utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !fine(r) }) < 0 {
		return s
	}
	var b strings.Builder
	for _, r := range s { // range yields U+FFFD for invalid UTF-8
		switch r1, r2 := utf16.EncodeRune(r); {
		case fine(r):
			b.WriteRune(r)
		case r1 != unicode.ReplacementChar:
			fmt.Fprintf(&b, `\u%04x\u%04x`, r1, r2)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// A Writer escapes what is written to W, except newlines and tabs. A Write must not split a
// character.
type Writer struct{ W io.Writer }

// Write implements io.Writer.
func (w Writer) Write(b []byte) (int, error) {
	if _, err := io.WriteString(w.W, escape(string(b), "\n\t")); err != nil {
		return 0, err
	}
	return len(b), nil
}
