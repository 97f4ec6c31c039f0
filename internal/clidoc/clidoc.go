// Package clidoc generates documentation from the help texts of a command line program: manual
// pages, and one Markdown page. Only programs built with the tag docs import it.
package clidoc

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Main handles "PROGRAM gen-man DIR", "PROGRAM gen-markdown", "PROGRAM gen-config FILE" and
// "PROGRAM gen-config-man FILE", and then exits. It returns if args are not one of these. gen-man
// writes the manual pages of root to DIR, that of root with a section about files, a pair of name
// and description each. gen-markdown prints one page with all commands. gen-config prints a page
// about the configuration file FILE, gen-config-man a manual page of section 5 about it.
func Main(args []string, root *cobra.Command, header *doc.GenManHeader, files ...[2]string) {
	var err error
	switch {
	case len(args) == 3 && args[1] == "gen-man":
		root.DisableAutoGenTag = true // no HISTORY section
		err = doc.GenManTree(root, header, args[2])
		if err == nil {
			err = addFiles(filepath.Join(args[2], root.Name()+"."+header.Section), files)
		}
	case len(args) == 2 && args[1] == "gen-markdown":
		err = Markdown(os.Stdout, root)
	case len(args) == 3 && args[1] == "gen-config":
		err = configFile(os.Stdout, args[2], root)
	case len(args) == 3 && args[1] == "gen-config-man":
		err = configMan(os.Stdout, args[2], root)
	default:
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", root.Name(), err)
		os.Exit(1)
	}
	os.Exit(0)
}

// addFiles adds a section about files to a manual page, before its references.
func addFiles(page string, files [][2]string) error {
	b, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	var section strings.Builder
	section.WriteString(".SH FILES\n")
	for _, f := range files {
		fmt.Fprintf(&section, ".TP\n\\fI%s\\fP\n%s\n", f[0], f[1])
	}
	const references = ".SH SEE ALSO"
	before, after, found := strings.Cut(string(b), references)
	if found {
		after = references + after
	}
	return os.WriteFile(page, []byte(strings.TrimRight(before, "\n")+"\n\n"+section.String()+"\n"+after), 0o644)
}

// configMan writes the manual page of the configuration file name of a program.
func configMan(w io.Writer, name string, root *cobra.Command) error {
	program := root.Name()
	var page bytes.Buffer
	title := filepath.Base(name)
	fmt.Fprintf(&page, "%% %s 5 \"\" %s \"File Formats\"\n\n# NAME\n\n%s - configuration of %s(8)\n\n", strings.ToUpper(title), program, title, program)
	var text bytes.Buffer
	if err := configFile(&text, name, root); err != nil {
		return err
	}
	page.WriteString(strings.Replace(text.String(), "# Configuration\n", "# DESCRIPTION\n", 1))
	fmt.Fprintf(&page, "# FILES\n\n*/etc/%s/%s*\n\n# SEE ALSO\n\n**%s(8)**\n", program, title, program)
	_, err := w.Write(md2man.Render(page.Bytes()))
	return err
}

func configFile(w io.Writer, name string, root *cobra.Command) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return Config(w, f, strings.ToUpper(root.Name())+"_", root.Flags())
}

// Markdown writes one page that describes root and all its subcommands.
func Markdown(w io.Writer, root *cobra.Command) error {
	var b bytes.Buffer
	root.InitDefaultHelpCmd()
	section(&b, root, 1)
	_, err := w.Write(b.Bytes())
	return err
}

func section(b *bytes.Buffer, cmd *cobra.Command, level int) {
	fmt.Fprintf(b, "%s %s\n\n", strings.Repeat("#", min(level, 3)), cmd.CommandPath())
	text := cmd.Long
	if text == "" {
		text = cmd.Short + "."
	}
	paragraphs(b, text)
	if cmd.Runnable() {
		fence(b, cmd.UseLine())
	}
	if cmd.Example != "" {
		b.WriteString("Examples:\n\n")
		fence(b, cmd.Example)
	}
	if f := cmd.NonInheritedFlags(); f.HasAvailableFlags() {
		b.WriteString("Options:\n\n")
		fence(b, f.FlagUsages())
	}
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "help" && sub.Name() != "completion" {
			section(b, sub, level+1)
		}
	}
}

// paragraphs writes help text. Indented lines, such as lists and tables, keep their layout.
func paragraphs(b *bytes.Buffer, text string) {
	for p := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		first, rest, more := strings.Cut(p, "\n")
		if more && strings.HasPrefix(rest, "  ") {
			fmt.Fprintf(b, "%s\n\n", escape(first))
			fence(b, rest)
			continue
		}
		if strings.HasPrefix(p, "  ") {
			fence(b, p)
			continue
		}
		fmt.Fprintf(b, "%s\n\n", escape(p))
	}
}

func fence(b *bytes.Buffer, text string) {
	fmt.Fprintf(b, "```text\n%s\n```\n\n", strings.TrimRight(text, "\n"))
}

// escape escapes the characters of help text that Markdown would take for markup: angle brackets
// and asterisks.
func escape(s string) string {
	return strings.NewReplacer("<", "&lt;", ">", "&gt;", "*", `\*`, "_", `\_`).Replace(s)
}
