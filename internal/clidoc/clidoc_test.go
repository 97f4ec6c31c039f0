package clidoc

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func TestMarkdown(t *testing.T) {
	root := &cobra.Command{Use: "tool", Short: "Tools", Long: "tool does <things>.\n\nExit codes:\n  0  done"}
	sub := &cobra.Command{Use: "cut FILE", Short: "Cut a file", Example: "  tool cut a", Run: func(*cobra.Command, []string) {}}
	sub.Flags().Int("size", 3, "pieces")
	hidden := &cobra.Command{Use: "secret", Hidden: true, Run: func(*cobra.Command, []string) {}}
	root.AddCommand(sub, hidden)
	var b strings.Builder
	if err := Markdown(&b, root); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"# tool\n\ntool does &lt;things&gt;.\n\nExit codes:\n\n```text\n  0  done\n```\n",
		"## tool cut\n\nCut a file.\n\n```text\ntool cut FILE [flags]\n```\n\nExamples:\n\n```text\n  tool cut a\n```\n",
		"--size int   pieces (default 3)",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "secret") {
		t.Error("the page has a hidden command")
	}
}

func TestConfig(t *testing.T) {
	const file = "# About the file.\n\n# How fast.\n# For example:\n#   speed: 3\nspeed: 1\nlow-speed: 0\n\n# Rules, which have no flag.\nslots: {}\n"
	const want = "# Configuration\n\nAbout the file.\n\n" +
		"## `speed`, `low-speed`\n\nHow fast.\nFor example:\n\n```text\n  speed: 3\n```\n\n```yaml\nspeed: 1\nlow-speed: 0\n```\n\n" +
		"`--speed`, `T_SPEED`\n\n`--low-speed`, `T_LOW_SPEED`\n\n" +
		"## `slots`\n\nRules, which have no flag.\n\n```yaml\nslots: {}\n```\n\n"
	flags := pflag.NewFlagSet("t", pflag.ContinueOnError)
	flags.String("speed", "", "")
	flags.String("low-speed", "", "")
	var b strings.Builder
	if err := Config(&b, strings.NewReader(file), "T_", flags); err != nil {
		t.Fatal(err)
	}
	if b.String() != want {
		t.Errorf("Config wrote\n%s\nwant\n%s", b.String(), want)
	}
}

// TestConfigMan checks that the manual page has the keys of the file, and the sections that man-
// pages(7) requires.
func TestConfigMan(t *testing.T) {
	name := filepath.Join(t.TempDir(), "iwarpd.yaml")
	if err := os.WriteFile(name, []byte("# What it is.\n\n# How deep.\nmax-depth: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	root := &cobra.Command{Use: "iwarpd"}
	root.Flags().String("max-depth", "", "")
	var b strings.Builder
	if err := configMan(&b, name, root); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{".TH", "IWARPD.YAML", ".SH NAME", ".SH DESCRIPTION", "max-depth", "How deep.", "IWARPD_MAX_DEPTH", ".SH FILES", ".SH SEE ALSO"} {
		if !strings.Contains(strings.ReplaceAll(b.String(), "\\-", "-"), want) {
			t.Errorf("no %q in\n%s", want, &b)
		}
	}
}

// TestManual checks that the page of a command lists its subcommands before its options and its files after them, that
// the options are paragraphs with tags, and that the title of a page is its name.
func TestManual(t *testing.T) {
	root := &cobra.Command{Use: "tool", Short: "Tools", Run: func(*cobra.Command, []string) {}}
	root.Flags().Bool("quick", false, "hurry")
	root.Flags().Int("size", 3, "pieces")
	sub := &cobra.Command{Use: "cut FILE", Short: "Cut a file", Run: func(*cobra.Command, []string) {}}
	hidden := &cobra.Command{Use: "secret", Hidden: true, Run: func(*cobra.Command, []string) {}}
	root.AddCommand(sub, hidden)
	dir := t.TempDir()
	if err := manuals(dir, root, "8", "Tools", []string{"saw(1)"}, [][2]string{{"/etc/x", "Settings."}}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "tool.8"))
	if err != nil {
		t.Fatal(err)
	}
	const want = ".SH COMMANDS\n.TP\n\\fBcut\\fP\nCut a file.\n\n" +
		".SH OPTIONS\n.TP\n\\fB-h\\fP, \\fB--help\\fP\nhelp for tool\n.TP\n\\fB--quick\\fP\nhurry\n.TP\n\\fB--size\\fP=3\npieces\n\n" +
		".SH FILES\n.TP\n\\fI/etc/x\\fP\nSettings.\n\n.SH SEE ALSO\n\\fBsaw(1)\\fP, \\fBtool-cut(8)\\fP\n"
	if !strings.Contains(string(b), want) {
		t.Errorf("no\n%s\nin\n%s", want, b)
	}
	if b, err = os.ReadFile(filepath.Join(dir, "tool-cut.8")); err != nil || strings.Contains(string(b), "[=false]") || !strings.Contains(string(b), `.TH "TOOL-CUT" "8"`) {
		t.Errorf("%v\n%s", err, b)
	}
}
