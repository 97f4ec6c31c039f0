// Package printable escapes text of others before it is shown: a name of a program or of
// a peer must not move the cursor of a terminal, begin a line of a log, or reverse the
// direction of what follows.
package printable

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// String returns s with each character that does not print as \uXXXX, in the way of JSON,
// so that it may stand in JSON strings too. The only space kept is U+0020.
func String(s string) string { return escape(s, "") }

// escape is String with the characters of keep as they are.
func escape(s, keep string) string {
	fine := func(r rune) bool { return unicode.IsPrint(r) || strings.ContainsRune(keep, r) }
	if utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !fine(r) }) < 0 {
		return s
	}
	var b strings.Builder
	for _, r := range s { // invalid UTF-8 is U+FFFD
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

// A Writer escapes what is written to W, but for newlines and tabs. Each Write must hold
// whole characters.
type Writer struct{ W io.Writer }

// Write implements io.Writer.
func (w Writer) Write(b []byte) (int, error) {
	if _, err := io.WriteString(w.W, escape(string(b), "\n\t")); err != nil {
		return 0, err
	}
	return len(b), nil
}
