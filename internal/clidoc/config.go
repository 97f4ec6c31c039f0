package clidoc

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
)

// Config writes a Markdown page that describes the configuration file yaml: its leading comment,
// then a section for each group of keys, with the comment above the group. Each key is also a flag
// and an environment variable with the prefix env, if flags has it.
func Config(w io.Writer, yaml io.Reader, env string, flags *pflag.FlagSet) error {
	var page, comment bytes.Buffer
	page.WriteString("# Configuration\n\n")
	lead, keys := true, []string(nil)
	flush := func() {
		if len(keys) == 0 && !lead {
			return
		}
		var names []string
		for _, k := range keys {
			name, _, _ := strings.Cut(k, ":")
			names = append(names, "`"+name+"`")
		}
		if len(keys) > 0 {
			fmt.Fprintf(&page, "## %s\n\n", strings.Join(names, ", "))
		}
		page.Write(markdown(comment.String()))
		if len(keys) > 0 {
			fmt.Fprintf(&page, "```yaml\n%s\n```\n\n", strings.Join(keys, "\n"))
			for _, k := range keys {
				name, _, _ := strings.Cut(k, ":")
				if flags.Lookup(name) != nil {
					fmt.Fprintf(&page, "`--%s`, `%s%s`\n\n", name, env, strings.ToUpper(strings.ReplaceAll(name, "-", "_")))
				}
			}
		}
		comment.Reset()
		keys, lead = nil, false
	}
	lines := bufio.NewScanner(yaml)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case line == "":
			flush()
		case strings.HasPrefix(line, "#"):
			comment.WriteString(strings.TrimPrefix(strings.TrimPrefix(line, "#"), " ") + "\n")
		default:
			keys = append(keys, line)
		}
	}
	flush()
	if err := lines.Err(); err != nil {
		return err
	}
	_, err := w.Write(page.Bytes())
	return err
}

// markdown converts the text of a comment to Markdown. Indented lines become a code block.
func markdown(text string) []byte {
	var b bytes.Buffer
	inside := false
	for line := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n") {
		indented := strings.HasPrefix(line, "  ")
		switch {
		case indented && !inside:
			b.WriteString("\n```text\n")
		case !indented && inside:
			b.WriteString("```\n\n")
		}
		inside = indented
		if !indented {
			line = escape(line)
		}
		b.WriteString(line + "\n")
	}
	if inside {
		b.WriteString("```\n")
	}
	b.WriteString("\n")
	return b.Bytes()
}
