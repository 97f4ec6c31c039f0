// Package clidoc generates documentation from the help texts of a command line program: manual
// pages, and one Markdown page. Only programs built with the tag docs import it.
package clidoc

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Main handles "PROGRAM gen-man DIR", "PROGRAM gen-markdown", "PROGRAM gen-config FILE" and
// "PROGRAM gen-config-man FILE", and then exits. It returns if args are not one of these. gen-man
// writes the manual pages of root, which are in the given section of the book, to DIR. The page of root
// also has a section about files, a pair of name and description each, and refers to the pages named in
// also. gen-markdown prints one page with all commands. gen-config prints a page about the configuration
// file FILE, gen-config-man a manual page of section 5 about it.
func Main(args []string, root *cobra.Command, section, book string, also []string, files ...[2]string) {
	var err error
	switch {
	case len(args) == 3 && args[1] == "gen-man":
		err = manuals(args[2], root, section, book, also, files)
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

// manuals writes the manual pages of root to dir, each with its own name as its title.
func manuals(dir string, root *cobra.Command, section, book string, also []string, files [][2]string) error {
	root.DisableAutoGenTag = true // no HISTORY section
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: section, Source: "iwarpd", Manual: book}, dir); err != nil {
		return err
	}
	return manual(dir, section, root, ending(also, files))
}

// ending returns a section about files, a pair of name and description each, and the beginning of SEE ALSO.
func ending(also []string, files [][2]string) string {
	var b strings.Builder
	b.WriteString(".SH FILES\n")
	for _, f := range files {
		fmt.Fprintf(&b, ".TP\n\\fI%s\\fP\n%s\n", f[0], f[1])
	}
	b.WriteString("\n.SH SEE ALSO\n")
	for _, page := range also {
		fmt.Fprintf(&b, "\\fB%s\\fP, ", page)
	}
	return b.String()
}

// manual completes the pages that cobra has written to dir for cmd and its subcommands. A page gets a list of the
// subcommands, and that of cmd the text before what it refers to.
func manual(dir, section string, cmd *cobra.Command, ending string) error {
	name := filepath.Join(dir, strings.ReplaceAll(cmd.CommandPath(), " ", "-")+"."+section)
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	var commands strings.Builder
	for _, sub := range cmd.Commands() {
		if !sub.IsAvailableCommand() {
			continue
		}
		fmt.Fprintf(&commands, ".TP\n\\fB%s\\fP\n%s.\n", sub.Name(), sub.Short)
		if err := manual(dir, section, sub, ""); err != nil {
			return err
		}
	}
	page := options(string(b))
	if commands.Len() > 0 {
		page = replace(page, ".SH OPTIONS\n", ".SH COMMANDS\n"+commands.String()+"\n.SH OPTIONS\n")
	}
	if ending != "" {
		page = replace(page, ".SH SEE ALSO\n", ending)
	}
	return os.WriteFile(name, []byte(page), 0o644)
}

// option is an option of a manual page of cobra.
var option = regexp.MustCompile(`(?m)^(?:\.PP\n)?(\\fB-.*)\n\t(.*)\n*`)

// options makes each option of a page a paragraph with a tag, and leaves out the value of a switch: that it is false is
// not what the switch alone means.
func options(page string) string {
	return option.ReplaceAllStringFunc(page, func(s string) string {
		m := option.FindStringSubmatch(s)
		return ".TP\n" + strings.TrimSuffix(m[1], "[=false]") + "\n" + m[2] + "\n"
	})
}

// replace replaces the heading of a section by text, after one empty line.
func replace(page, heading, text string) string {
	before, after, _ := strings.Cut(page, heading)
	return strings.TrimRight(before, "\n") + "\n\n" + text + after
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
